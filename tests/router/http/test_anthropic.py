"""POST /v1/messages: Anthropic's protocol over the same chats, proven with Anthropic's own client, unmodified."""

import asyncio
import json
from typing import Any

import pytest

from baton.router.model.chat_template import ChatTemplate
from tests.fixtures.client_environment import problems
from tests.router.http.conftest import Gateway
from tests.router.http.test_openai_client import script
from tests.router.http.test_thoughts import QWEN3

PATH = "/v1/messages"
SCENARIOS = ("create", "stream", "tools", "counts", "beta", "refusals")
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}
TOOLS = [{"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
USE = {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Rome"}}


async def test_its_own_client(gateway: Gateway) -> None:
    gateway.pair.script = script
    url = f"http://127.0.0.1:{gateway.port}"
    assert await asyncio.to_thread(problems, "anthropic_client", url, SCENARIOS) == []


async def thinking(gateway: Gateway, *answers: str) -> None:
    served = (await gateway.process.dispatcher.choose("")).served
    served.tokenizer.chat_template = ChatTemplate(QWEN3 + "{% if tools %}{# <tool_call> #}{% endif %}", {})
    gateway.says(*answers)


async def events(gateway: Gateway, **body: Any) -> list[tuple[str, dict[str, Any]]]:
    response = await gateway.client.post(PATH, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    parts = [part.partition("\ndata: ") for part in response.text.split("\n\n") if part]
    return [(kind.removeprefix("event: "), json.loads(data)) for kind, _, data in parts]


async def test_thoughts_text_and_calls_are_blocks(gateway: Gateway) -> None:
    await thinking(gateway, f"<think>Hm.</think>I look. {CALL}")

    answer = await gateway.post(PATH, **ASKED, tools=TOOLS, thinking={"type": "enabled", "budget_tokens": 99})

    thought, text, call = answer["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", "Hm.")
    assert text == {"type": "text", "text": "I look."}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Rome"})
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)


async def test_a_stream_grows_to_the_same_blocks(gateway: Gateway) -> None:
    await thinking(gateway, f"<think>Hm.</think>I look. {CALL}{CALL}")
    asked = {**ASKED, "max_tokens": 400, "tools": TOOLS, "thinking": {"type": "adaptive"}}

    sent = await events(gateway, **asked)

    grown: list[dict[str, Any]] = []
    for kind, event in sent:
        assert event["type"] == kind
        match kind:
            case "content_block_start":
                assert event["index"] == len(grown)
                grown.append({**event["content_block"], "arguments": ""})
            case "content_block_delta":
                assert event["index"] == len(grown) - 1
                delta = event["delta"]
                name = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
                into = "arguments" if delta["type"] == "input_json_delta" else name[delta["type"]]
                grown[-1][into] += delta[name[delta["type"]]]
    assert [block["type"] for block in grown] == ["thinking", "text", "tool_use", "tool_use"]
    assert (grown[0]["thinking"], grown[1]["text"]) == ("Hm.", "I look.")
    assert [json.loads(block["arguments"]) for block in grown[2:]] == [{"city": "Rome"}] * 2
    assert sum(kind == "content_block_stop" for kind, _ in sent) == 4
    assert [kind for kind, _ in sent[-2:]] == ["message_delta", "message_stop"]
    assert sent[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


async def test_earlier_turns_reach_the_template(gateway: Gateway) -> None:
    gateway.says("ok")
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "sunny"}]}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, USE]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]

    await gateway.post(PATH, messages=turns, max_tokens=9, system=[{"type": "text", "text": "Be brief."}])

    assert gateway.prompt() == (
        "[system]Be brief.[user]a\nb[assistant]I look."
        '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>[tool]sunny[user]So?[assistant]'
    )


async def test_a_failed_tool_says_so(gateway: Gateway) -> None:
    gateway.says("ok")
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": "no such city", "is_error": True}
    turns = [*ASKED["messages"], {"role": "assistant", "content": [USE]}, {"role": "user", "content": [result]}]
    await gateway.post(PATH, messages=turns, max_tokens=9)
    assert gateway.prompt().endswith("[tool]Error: no such city[assistant]")


async def test_a_stop_sequence_is_named(gateway: Gateway) -> None:
    gateway.says("one two three")
    answer = await gateway.post(PATH, **ASKED, stop_sequences=["two"])
    assert answer["content"] == [{"type": "text", "text": "one "}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "two")


async def test_an_answer_that_is_cut_says_so(gateway: Gateway) -> None:
    gateway.says("one two three")
    answer = await gateway.post(PATH, messages=ASKED["messages"], max_tokens=3)
    assert (answer["content"][0]["text"], answer["stop_reason"]) == ("one", "max_tokens")


async def test_tokens_of_the_cache_are_counted_apart(gateway: Gateway) -> None:
    gateway.says("ok")
    usage = (await gateway.post(PATH, **ASKED))["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len("[user]hi[assistant]")


@pytest.mark.parametrize(("asked", "thinks"), [(None, False), ("disabled", False), ("adaptive", True)])
async def test_a_model_that_can_choose_thinks_where_it_is_asked_to(
    gateway: Gateway, asked: str | None, thinks: bool
) -> None:
    await thinking(gateway, "Two.")
    await gateway.post(PATH, **ASKED, **({} if asked is None else {"thinking": {"type": asked}}))
    assert gateway.prompt().endswith("[assistant]") is thinks


async def test_a_session_is_named_by_the_field_or_by_the_end_of_the_users_id(gateway: Gateway) -> None:
    gateway.says("ok")
    as_json = json.dumps({"device_id": "d", "account_uuid": "", "session_id": "abc"})
    users = ("user_1_account__session_abc", as_json)
    for fields in (*({"metadata": {"user_id": user}} for user in users), {"session_id": "abc"}):
        await gateway.post(PATH, **ASKED, **fields)
    sent = [c.prefill for c in gateway.pair.prefill.commands if c.WhichOneof("command") == "prefill"]
    assert len(sent) == 3 and {each.kept_session.id for each in sent} != {b""}
    assert len({each.kept_session.id for each in sent}) == 1


async def test_a_time_to_live_without_a_session_has_no_effect(gateway: Gateway) -> None:
    mark = {"cache_control": {"type": "ephemeral", "ttl": "5m"}}
    text = [{"type": "text", "text": "hi", **mark}]
    for fields in (
        mark,
        {"system": text},
        {"messages": [{"role": "user", "content": text}]},
        {"tools": [TOOLS[0] | mark]},
    ):
        await gateway.post(PATH, **{**ASKED, **fields})
        assert not gateway.prefill.HasField("kept_session"), fields
        await gateway.post(PATH, **{**ASKED, **fields}, session_id="s")
        assert gateway.prefill.kept_session.keep_for_s == 300, fields


async def test_a_session_that_is_refused_is_named_by_the_field_that_the_client_sent(gateway: Gateway) -> None:
    user_id = json.dumps({"session_id": "x" * 300})
    error = await gateway.refused(PATH, **ASKED, metadata={"user_id": user_id})
    assert error["message"].startswith("metadata.user_id: ")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": [{"role": "assistant", "content": "I"}]}, "messages[0].role"),
    ({"messages": [{"role": "system", "content": "I"}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
    ({"thinking": {"type": "enabled"}}, "thinking"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"temperature": -1.0}, "temperature"),
    ({"top_logprobs": 1}, "top_logprobs"),
    ({"stop_sequences": [""]}, "stop_sequences"),
]


@pytest.mark.parametrize(("fields", "named"), WRONG)
async def test_what_is_wrong_is_named_as_its_clients_read_it(
    gateway: Gateway, fields: dict[str, Any], named: str
) -> None:
    response = await gateway.client.post(PATH, json={**ASKED, **fields})
    assert response.status_code == 400, response.text
    body = response.json()
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert body["error"]["message"].startswith(named), body


async def test_the_prompt_is_counted_and_nothing_is_answered(gateway: Gateway) -> None:
    asked = {"messages": ASKED["messages"], "system": "x"}
    assert await gateway.post(f"{PATH}/count_tokens", **asked) == {"input_tokens": len("[system]x[user]hi[assistant]")}
