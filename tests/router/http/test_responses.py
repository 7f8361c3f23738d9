"""POST /v1/responses: items of thoughts, text and calls, whole and as events."""

import json
from typing import Any

from baton.router.http.responses.bodies import ResponseRequest
from baton.router.http.responses.items import chat_messages, given_items
from tests.router.http.conftest import Gateway

PATH = "/v1/responses"
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
TOOL: dict[str, Any] = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
OTHER_TOOL: dict[str, Any] = {"type": "function", "name": "clock"}


async def events(gateway: Gateway, **body: Any) -> list[dict[str, Any]]:
    named = await gateway.events(PATH, **body)
    found: list[dict[str, Any]] = [event for _, event in named]
    assert [event["type"] for event in found] == [name for name, _ in named]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def kinds(sent: list[dict[str, Any]]) -> list[str]:
    """Of the events, each run of equal ones once."""
    names = [event["type"].removeprefix("response.") for event in sent]
    return [name for place, name in enumerate(names) if place == 0 or names[place - 1] != name]


async def test_thoughts_text_and_calls_are_items(gateway: Gateway) -> None:
    await gateway.thinks(f"<think>Hm.</think>I look. {CALL}")

    answer = await gateway.post(PATH, input="hi", tools=[TOOL])

    thought, text, call = answer["output"]
    assert (thought["type"], thought["summary"]) == ("reasoning", [])
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert (text["type"], text["content"][0]["text"]) == ("message", "I look.")
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "weather", {"city": "Rome"})
    assert call["call_id"] != call["id"] and {each["status"] for each in answer["output"]} == {"completed"}
    assert len({each["id"] for each in answer["output"]}) == 3
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == len("<think>Hm.</think>")
    assert answer["tools"][0]["name"] == "weather" and answer["tool_choice"] == "auto"


async def test_events_are_sent_in_order(gateway: Gateway) -> None:
    await gateway.thinks(f"<think>Hm.</think>I look. {CALL}")

    sent = await events(gateway, input="hi", tools=[TOOL])

    assert kinds(sent) == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip


async def test_deltas_make_the_items_of_the_whole_answer(gateway: Gateway) -> None:
    await gateway.thinks(f"<think>Hm.</think>I look. {CALL}{CALL}")

    sent = await events(gateway, input="hi", tools=[TOOL])

    grown: dict[str, str] = {}
    for event in sent:
        if event["type"].endswith(".delta"):
            grown[event["item_id"]] = grown.get(event["item_id"], "") + event["delta"]
        elif event["type"].endswith("output_item.added"):
            assert event["item"]["status"] == "in_progress" and not event["item"].get("content")
    output = sent[-1]["response"]["output"]
    assert [event["item"] for event in sent if event["type"].endswith("output_item.done")] == output
    texts = [each["arguments"] if "arguments" in each else each["content"][0]["text"] for each in output]
    assert list(grown) == [each["id"] for each in output] and list(grown.values()) == texts
    assert [each["type"] for each in output] == ["reasoning", "message", "function_call", "function_call"]


async def test_thoughts_are_the_summary_where_one_is_asked_for(gateway: Gateway) -> None:
    await gateway.thinks("<think>Hm.</think>Two.")

    sent = await events(gateway, input="hi", reasoning={"summary": "auto"})

    assert kinds(sent)[2:8] == [
        "output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta",
        "reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done",
    ]  # fmt: skip
    thought = sent[-1]["response"]["output"][0]
    assert (thought["summary"], thought["content"]) == ([{"type": "summary_text", "text": "Hm."}], [])


async def test_cut_item_is_incomplete(gateway: Gateway) -> None:
    await gateway.thinks("<think>Hm.</think>Two and two.")
    last = (await events(gateway, input="hi", max_output_tokens=len("<think>Hm.</think>Two")))[-1]
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "incomplete")
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [each["status"] for each in last["response"]["output"]] == ["completed", "incomplete"]


async def test_effort_turns_thoughts_on_and_off(gateway: Gateway) -> None:
    await gateway.thinks("Two.")
    for effort, thinks in (("none", False), ("low", True)):
        await gateway.post(PATH, input="hi", reasoning={"effort": effort})
        assert gateway.prompt().endswith("[assistant]") is thinks


async def test_items_of_an_earlier_turn_reach_the_template(gateway: Gateway) -> None:
    gateway.says("ok")
    conversation = [
        {"role": "user", "content": "Weather?"},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [
            {"type": "output_text", "text": "I look.", "annotations": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "sunny"}]},
    ]  # fmt: skip

    await gateway.post(PATH, input=conversation, instructions="Be brief.")

    assert gateway.prompt() == (
        "[system]Be brief.[user]Weather?[assistant]I look."
        '<tool_call>{"name": "weather", "arguments": {}}</tool_call>[tool]sunny[assistant]'
    )
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    error = await gateway.refused(PATH, input=[conversation[0], thought, *conversation[1:]])
    assert error["param"] == "input" and "does not show reasoning" in error["message"]


def test_thoughts_belong_to_the_following_turn() -> None:
    request = ResponseRequest.model_validate(
        {
            "input": [
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a b"}]},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "c"}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "x"},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "d"}]},
                {"role": "assistant", "content": "e"},
                {"role": "assistant", "content": "f"},
            ]
        }
    )
    first, result, second, third = chat_messages(given_items(request.input, "r"))
    assert first["reasoning_content"] == "a b\nc" and [each["id"] for each in first["tool_calls"]] == ["1", "2"]
    assert result == {"role": "tool", "content": "x", "tool_call_id": "1"}
    assert (second["reasoning_content"], second["content"]) == ("d", "e")
    assert (third["reasoning_content"], third["content"]) == ("", "f")


async def test_forced_call_is_one_item_where_calls_may_not_be_parallel(gateway: Gateway) -> None:
    choices: tuple[Any, ...] = ("auto", "required", {"type": "function", "name": "weather"})
    for choice in choices:
        gateway.says(CALL * 2 if choice == "auto" else CALL)  # a form lets only one be written
        answer = await gateway.post(PATH, input="hi", tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
        (call,) = answer["output"]
        assert (call["name"], json.loads(call["arguments"])) == ("weather", {"city": "Rome"})
        assert answer["tool_choice"] == choice and answer["parallel_tool_calls"] is False
        assert gateway.prefill.sampling.HasField("structured") is (choice != "auto")


async def test_only_allowed_tools_are_shown(gateway: Gateway) -> None:
    gateway.says("ok")
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "clock"}]}
    answer = await gateway.post(PATH, input="hi", tools=[TOOL, OTHER_TOOL], tool_choice=allowed)
    assert "clock" in gateway.prompt() and "weather" not in gateway.prompt()
    assert answer["tool_choice"] == allowed and len(answer["tools"]) == 2


async def test_form_is_followed(gateway: Gateway) -> None:
    gateway.says("{}")
    form = {"type": "json_schema", "name": "any", "schema": {"type": "object"}}
    answer = await gateway.post(PATH, input="hi", text={"format": form})
    assert json.loads(gateway.prefill.sampling.structured.text) == {"type": "object"}
    assert answer["text"]["format"] == form


async def test_budget_of_thoughts_is_that_of_a_chat(gateway: Gateway) -> None:
    await gateway.thinks("<think>hm</think>yes")
    await gateway.post("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], thinking_budget=5)
    asked = gateway.prefill.sampling.structured
    await gateway.post(PATH, input="hi", thinking_budget=5)
    assert gateway.prefill.sampling.structured == asked and asked.text
