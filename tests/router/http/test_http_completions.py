"""POST /v1/completions, against fake workers."""

import pytest

from tests.router.conftest import encode
from tests.router.http.conftest import Gateway

PATH = "/v1/completions"
CHAT = "/v1/chat/completions"


async def test_text_is_continued(gateway: Gateway) -> None:
    gateway.says("world")

    answer = await gateway.post(PATH, prompt="hello ", max_tokens=5)

    assert answer["object"] == "text_completion"
    (choice,) = answer["choices"]
    assert choice["text"] == "world" and choice["finish_reason"] == "length" and choice["stop_reason"] is None
    assert gateway.prompt() == "hello "


async def test_chat_stream_begins_with_the_role_and_ends_with_the_reason(gateway: Gateway) -> None:
    gateway.says("hello")

    chunks = await gateway.stream(CHAT, messages=[{"role": "user", "content": "hi"}])

    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "hello"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


async def test_sixteen_tokens_are_the_default(gateway: Gateway) -> None:
    gateway.says("x" * 40)

    answer = await gateway.post(PATH, prompt="hello")

    assert answer["usage"]["completion_tokens"] == 16


async def test_token_ids_are_a_prompt(gateway: Gateway) -> None:
    answer = await gateway.post(PATH, prompt=encode("abc"), max_tokens=3, return_token_ids=True)

    (choice,) = answer["choices"]
    assert choice["text"] == "abc"
    assert choice["token_ids"] == encode("abc") == choice["prompt_token_ids"]


@pytest.mark.parametrize("prompts", [["ab", "cd"], [encode("ab"), encode("cd")]])
async def test_several_prompts_are_answered_together(gateway: Gateway, prompts: list[object]) -> None:
    answer = await gateway.post(PATH, prompt=prompts, n=2, max_tokens=4)

    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        (0, "abab"), (1, "baba"), (2, "cdcd"), (3, "dcdc"),
    ]  # fmt: skip
    assert answer["usage"]["prompt_tokens"] == 4 and answer["usage"]["completion_tokens"] == 16


async def test_several_prompts_are_streamed_together(gateway: Gateway) -> None:
    chunks = await gateway.stream(PATH, prompt=["ab", "cd", "ef"], max_tokens=6, stream_options={"include_usage": True})

    texts = {0: "", 1: "", 2: ""}
    for chunk in chunks[:-1]:
        assert chunk["usage"] is None
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {0: "ababab", 1: "cdcdcd", 2: "efefef"}
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 18


async def test_usage_is_in_every_chunk_if_requested(gateway: Gateway) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}

    chunks = await gateway.stream(PATH, prompt="abc", max_tokens=4, stream_options=options)

    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] >= 1 and counts[-1] == 4
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {3}


async def test_stop_text_ends_the_answer_and_is_reported(gateway: Gateway) -> None:
    gateway.says("one two three")

    (choice,) = (await gateway.post(PATH, prompt="x", stop=" th"))["choices"]

    assert choice["text"] == "one two" and choice["finish_reason"] == "stop" and choice["stop_reason"] == " th"


@pytest.mark.parametrize("stream", [False, True])
async def test_only_requested_stop_tokens_are_reported_as_stop_reason(gateway: Gateway, stream: bool) -> None:
    gateway.says("one")
    (letter,) = encode("n")

    async def reason(path: str, **fields: object) -> object:
        if stream:
            return (await gateway.stream(path, **fields))[-1]["choices"][0]["stop_reason"]
        return (await gateway.post(path, **fields))["choices"][0]["stop_reason"]

    for path, asked in ((PATH, {"prompt": "x"}), (CHAT, {"messages": [{"role": "user", "content": "x"}]})):
        assert await reason(path, **asked) is None, "the model's own end"
        assert await reason(path, **asked, stop_token_ids=[letter]) == letter


async def test_echo_puts_the_prompt_before_every_choice(gateway: Gateway) -> None:
    answer = await gateway.post(PATH, prompt="ab", max_tokens=2, n=2, echo=True)

    assert [choice["text"] for choice in answer["choices"]] == ["abab", "abba"]
    chunks = await gateway.stream(PATH, prompt="ab", max_tokens=2, n=2, echo=True)
    texts = ["", ""]
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["abab", "abba"]


async def test_null_fields_equal_absent_ones(gateway: Gateway) -> None:
    answer = await gateway.post(
        PATH, prompt="a", max_tokens=1, stop=None, logprobs=None, suffix=None, guided_regex=None
    )

    assert answer["choices"][0]["text"] == "a"


async def test_another_model_is_not_found(gateway: Gateway) -> None:
    error = await gateway.refused(PATH, 404, prompt="a", model="gpt-5")

    assert error["param"] == "model" and error["code"] == "model_not_found"
