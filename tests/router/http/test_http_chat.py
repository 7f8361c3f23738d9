"""POST /v1/chat/completions, against fake workers."""

from tests.router.http.conftest import Gateway

ASKED = {"messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"


async def test_a_whole_answer(gateway: Gateway) -> None:
    gateway.says("hello")

    answer = await gateway.post(PATH, **ASKED)

    assert answer["object"] == "chat.completion" and answer["model"] == "tiny"
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello", "refusal": None}
    assert choice["finish_reason"] == "stop" and choice["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 6  # the end is a token too
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + 6
    assert gateway.prompt() == "[user]hi[assistant]"


async def test_a_stream_says_the_role_then_the_text_then_the_reason(gateway: Gateway) -> None:
    gateway.says("hello")

    chunks = await gateway.stream(PATH, **ASKED)

    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "hello"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)
