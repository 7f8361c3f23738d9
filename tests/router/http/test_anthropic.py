"""POST /v1/messages: Anthropic's protocol over the same chats, proven with Anthropic's own client, unmodified."""

import json
from typing import Any

from tests.router.http.conftest import Gateway

PATH = "/v1/messages"
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}
TOOLS = [{"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
USE = {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Rome"}}


async def test_thoughts_text_and_calls_are_blocks(gateway: Gateway) -> None:
    await gateway.thinks(f"<think>Hm.</think>I look. {CALL}")

    answer = await gateway.post(PATH, **ASKED, tools=TOOLS, thinking={"type": "enabled", "budget_tokens": 99})

    thought, text, call = answer["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", "Hm.")
    assert text == {"type": "text", "text": "I look."}
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Rome"})
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)


async def test_stream_grows_to_the_same_blocks(gateway: Gateway) -> None:
    await gateway.thinks(f"<think>Hm.</think>I look. {CALL}{CALL}")
    asked = {**ASKED, "max_tokens": 400, "tools": TOOLS, "thinking": {"type": "adaptive"}}

    sent = await gateway.events(PATH, **asked)

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


async def test_failed_tool_says_so(gateway: Gateway) -> None:
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": "no such city", "is_error": True}
    turns = [*ASKED["messages"], {"role": "assistant", "content": [USE]}, {"role": "user", "content": [result]}]
    await gateway.post(PATH, messages=turns, max_tokens=9)
    assert gateway.prompt().endswith("[tool]Error: no such city[assistant]")


async def test_answer_says_why_it_ended(gateway: Gateway) -> None:
    gateway.says("one two three")
    stopped = await gateway.post(PATH, **ASKED, stop_sequences=["two"])
    cut = await gateway.post(PATH, messages=ASKED["messages"], max_tokens=3)
    assert stopped["content"] == [{"type": "text", "text": "one "}]
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "two")
    assert (cut["content"][0]["text"], cut["stop_reason"]) == ("one", "max_tokens")
    usage = cut["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len("[user]hi[assistant]")


async def test_model_that_can_choose_thinks_where_it_is_asked_to(gateway: Gateway) -> None:
    await gateway.thinks("Two.")
    for asked, thinks in ((None, False), ("disabled", False), ("adaptive", True)):
        await gateway.post(PATH, **ASKED, **({} if asked is None else {"thinking": {"type": asked}}))
        assert gateway.prompt().endswith("[assistant]") is thinks, asked


async def test_session_is_named_by_the_field_or_by_the_end_of_the_users_id(gateway: Gateway) -> None:
    gateway.says("ok")
    as_json = json.dumps({"device_id": "d", "account_uuid": "", "session_id": "abc"})
    users = ("user_1_account__session_abc", as_json)
    for fields in (*({"metadata": {"user_id": user}} for user in users), {"session_id": "abc"}):
        await gateway.post(PATH, **ASKED, **fields)
    sent = [c.prefill for c in gateway.pair.prefill.commands if c.WhichOneof("command") == "prefill"]
    assert len(sent) == 3 and {each.kept_session.id for each in sent} != {b""}
    assert len({each.kept_session.id for each in sent}) == 1


async def test_time_to_live_without_a_session_has_no_effect(gateway: Gateway) -> None:
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


async def test_prompt_is_counted_and_nothing_is_answered(gateway: Gateway) -> None:
    asked = {"messages": ASKED["messages"], "system": "x"}
    assert await gateway.post(f"{PATH}/count_tokens", **asked) == {"input_tokens": len("[system]x[user]hi[assistant]")}
