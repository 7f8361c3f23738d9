"""Ollama's API over the same chats and completions, proven with Ollama's own client, unmodified."""

import asyncio
import json
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from baton.protos import sampling_pb2, session_pb2
from baton.router.http.ollama.models import listed, shown
from baton.router.model.served_model import ChosenModel
from baton.router.types.worker import Adapter
from tests.router.conftest import encode
from tests.router.http.conftest import Gateway

CHAT, GENERATE = "/api/chat", "/api/generate"
HI = [{"role": "user", "content": "hi"}]
ASKED: dict[str, Any] = {"messages": HI, "stream": False}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'


async def lines(gateway: Gateway, path: str, **body: Any) -> list[dict[str, Any]]:
    response = await gateway.client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


async def test_answer_is_streamed_unless_it_is_asked_for_whole(gateway: Gateway) -> None:
    gateway.says("hello")
    *parts, last = await lines(gateway, CHAT, messages=HI)
    assert "".join(part["message"]["content"] for part in parts) == "hello"
    assert [part["done"] for part in parts] == [False] * len(parts)
    assert (last["done"], last["done_reason"], last["message"]["content"]) == (True, "stop", "")
    assert (await gateway.post(CHAT, **ASKED))["message"] == {"role": "assistant", "content": "hello"}


async def test_thoughts_text_and_calls_are_apart(gateway: Gateway) -> None:
    await gateway.thinks(f"<think>Hm.</think>I look. {CALL}{CALL}")

    message = (await gateway.post(CHAT, **ASKED, tools=TOOLS, think=True))["message"]
    streamed = [part["message"] for part in await lines(gateway, CHAT, messages=HI, tools=TOOLS, think=True)]

    functions = [{"index": index, "name": "weather", "arguments": {"city": "Rome"}} for index in range(2)]
    assert (message["thinking"], message["content"]) == ("Hm.", "I look.")
    assert [call["function"] for call in message["tool_calls"]] == functions
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert "".join(part.get("thinking", "") for part in streamed) == "Hm."
    assert "".join(part["content"] for part in streamed) == "I look."
    assert [call["function"] for part in streamed for call in part.get("tool_calls", ())] == functions


async def test_cut_call_is_shown_unchanged(gateway: Gateway) -> None:
    gateway.says(CALL)
    cut = len('<tool_call>{"name": "weather", "arguments": {"ci')
    answer = await gateway.post(CHAT, **ASKED, tools=TOOLS, options={"num_predict": cut})
    assert answer["message"]["tool_calls"][0]["function"]["arguments"] == {"_raw": '{"ci'}
    assert answer["done_reason"] == "length"


async def test_earlier_turns_reach_the_template(gateway: Gateway) -> None:
    gateway.says("ok")
    call = {"id": "call_1", "function": {"name": "weather", "arguments": {"city": "Rome"}, "index": 0}}
    turns = [
        {"role": "system", "content": "Be brief."},
        *HI,
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_name": "weather", "tool_call_id": "call_1"},
    ]
    await gateway.post(CHAT, messages=turns, stream=False)
    assert gateway.prompt() == (
        "[system]Be brief.[user]hi[assistant]I look."
        '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>[tool]sunny[assistant]'
    )


async def test_prompt_goes_through_the_template_unless_it_is_raw(gateway: Gateway) -> None:
    gateway.says("ok")
    await gateway.post(GENERATE, prompt="hi", system="Be brief.", stream=False)
    assert gateway.prompt() == "[system]Be brief.[user]hi[assistant]"
    answer = await gateway.post(GENERATE, prompt="hi", raw=True, stream=False)
    assert (gateway.prompt(), answer["response"]) == ("hi", "ok")


async def test_answer_without_a_length_is_bounded_by_the_context(gateway: Gateway) -> None:
    gateway.says("x" * 100)
    fields: dict[str, dict[str, Any]] = {CHAT: {"messages": HI}, GENERATE: {"prompt": "hi", "raw": True}}
    for path, body in fields.items():
        for options in ({}, {"num_predict": -1}, {"num_predict": -2}):
            answer = await gateway.post(path, **body, stream=False, options=options)
            assert (answer["eval_count"], answer["done_reason"]) == (101, "stop")
        answer = await gateway.post(path, **body, stream=False, options={"num_predict": 7})
        assert (answer["eval_count"], answer["done_reason"]) == (7, "length")


async def test_options_are_the_samplers(gateway: Gateway) -> None:
    gateway.says("ok")
    numbers = {"temperature": 0.5, "top_k": 7, "top_p": 0.75, "min_p": 0.25, "typical_p": 0.5}
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.25}
    options = {**numbers, **penalties, "repeat_penalty": 1.25, "seed": 3, "num_predict": 9}

    await gateway.post(CHAT, **ASKED, options=options)

    sent = gateway.prefill.sampling
    for name, value in (numbers | penalties | {"repetition_penalty": 1.25}).items():
        assert getattr(sent, name) == value, name
    assert sent.seed == 3
    seeds = set()
    for _ in range(2):
        await gateway.post(CHAT, **ASKED, options={"seed": -1})
        seeds.add(gateway.prefill.sampling.seed)
    assert len(seeds) == 2, "-1 is another seed each time"


async def test_stop_text_ends_the_answer(gateway: Gateway) -> None:
    gateway.says("one two three")
    answer = await gateway.post(CHAT, **ASKED, options={"stop": ["two"]})
    assert (answer["message"]["content"], answer["done_reason"]) == ("one ", "stop")


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


async def test_form_reaches_the_sampler(gateway: Gateway) -> None:
    gateway.pair.script = lambda prompt, choice: [5]
    forms: list[tuple[Any, int, str]] = [
        ("json", sampling_pb2.STRUCTURED_KIND_JSON_OBJECT, ""),
        (SCHEMA, sampling_pb2.STRUCTURED_KIND_JSON_SCHEMA, json.dumps(SCHEMA, separators=(",", ":"))),
    ]
    for (form, kind, text), raw in product(forms, (False, True)):
        await gateway.post(GENERATE, prompt="hi", raw=raw, stream=False, format=form, options={"num_predict": 1})
        asked = gateway.prefill.sampling.structured
        assert (asked.kind, asked.text) == (kind, text)


async def test_model_with_optional_thinking_thinks_by_default(gateway: Gateway) -> None:
    await gateway.thinks("Two.")
    for asked, thinks in ((None, True), (True, True), ("low", True), (False, False)):
        await gateway.post(CHAT, **ASKED, think=asked)
        assert gateway.prompt().endswith("[assistant]") is thinks, asked


async def test_durations_are_parts_of_the_whole(gateway: Gateway) -> None:
    gateway.says("hello")
    answer = await gateway.post(CHAT, **ASKED)
    parts = [answer[f"{part}_duration"] for part in ("load", "prompt_eval", "eval")]
    assert all(part > 0 for part in parts)
    assert sum(parts) == pytest.approx(answer["total_duration"], abs=3)
    assert answer["prompt_eval_count"] == len("[user]hi[assistant]")


async def test_error_in_a_stream_is_its_last_line(gateway: Gateway) -> None:
    gateway.pair.manual = True
    opened = gateway.client.stream("POST", CHAT, json={"messages": HI})
    attempt = asyncio.create_task(gateway.pair.prefill.received("prefill"))
    attempt.add_done_callback(lambda done: gateway.pair.first_step(done.result().attempt_id, encode("x")))
    async with opened as response:
        received = response.aiter_lines()
        first = json.loads(await anext(received))
        gateway.pair.decode.fail(attempt.result().attempt_id, session_pb2.FAILURE_REASON_NONFINITE)
        (last,) = [json.loads(line) async for line in received]
    assert first["message"]["content"] == "x"
    assert last.keys() == {"error"} and last["error"]


async def test_unknown_path_is_an_error_of_ollama(gateway: Gateway) -> None:
    for path in ("/api/embeddings", "/api/pull", "/api/nothing"):
        error = await gateway.refused(path, 404, model="tiny")
        assert error.startswith(f"unknown path {path}")
        assert (": " in error) is (path != "/api/nothing"), "a known path of Ollama's has a reason"


async def test_model_is_listed_with_its_capabilities(gateway: Gateway) -> None:
    get = gateway.client.get
    (listed,) = (await get("/api/tags")).json()["models"]
    (running,) = (await get("/api/ps")).json()["models"]
    shown = await gateway.post("/api/show", model="tiny:latest")
    assert listed["name"] == running["name"] == "tiny" and listed["digest"] == running["digest"]
    assert running["context_length"] == 1024
    assert shown["capabilities"] == ["completion", "tools"]
    await gateway.thinks()
    assert (await gateway.post("/api/show", name="tiny"))["capabilities"] == ["completion", "tools", "thinking"]
    assert (await get("/api/version")).json().keys() == {"version"}


async def test_adapter_is_a_model_with_a_parent(gateway: Gateway) -> None:
    served = (await gateway.process.dispatcher.choose("")).served
    polite = ChosenModel(replace(served, family="llama"), Adapter("polite", "abc"))
    named = listed(polite, "2026-11-26T12:00:00Z")
    assert (named["name"], named["digest"], named["details"]["parent_model"]) == ("polite", "abc", "tiny")
    assert shown(polite)["model_info"]["llama.context_length"] == 1024


async def test_long_conversation_is_parsed_elsewhere_and_answered(gateway: Gateway) -> None:
    gateway.says("ok")
    empty = [{"role": "user", "content": ""}] * 2000
    error = await gateway.refused(CHAT, messages=empty + HI, stream=False)
    assert error.startswith("messages: "), "too long for the context"
    await gateway.thinks("ok", template="{{ messages[-1].content }}")
    await gateway.post(CHAT, messages=empty + HI, stream=False)
    assert gateway.prompt() == "hi"
