"""gRPC's Chat has all that HTTP's has: the same prompts, forms, parts and refusals, through the Python client."""

import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from baton.client import (
    AsyncBatonClient,
    CallBegins,
    CallPart,
    Delta,
    FinishReason,
    InvalidRequest,
    Message,
    ThoughtPart,
    Tool,
    ToolCall,
)
from baton.client.answer import Continuity
from baton.client.responses import event_from
from baton.protos import baton_pb2, baton_pb2_grpc
from tests.router.http.conftest import WAIT_S, Gateway

PATH = "/v1/chat/completions"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture
async def baton(gateway: Gateway) -> AsyncIterator[AsyncBatonClient]:
    async with AsyncBatonClient(f"127.0.0.1:{gateway.process.running.ports[0]}", timeout_s=WAIT_S) as client:
        yield client


async def test_answer_has_the_parts_that_it_has_over_http(gateway: Gateway, baton: AsyncBatonClient) -> None:
    await gateway.thinks(f"<think>hm</think>I look.{CALL}{CALL}")

    message = (await gateway.post(PATH, messages=ASKED, tools=TOOLS, max_tokens=300))["choices"][0]["message"]
    answer = await baton.complete_chat(ASKED, tools=TOOLS, max_tokens=300)

    assert (answer.text, answer.thoughts) == (message["content"], message["reasoning_content"]) == ("I look.", "hm")
    assert [call.name for call in answer.calls] == ["weather"] * 2
    functions = [call["function"]["arguments"] for call in message["tool_calls"]]
    assert [call.arguments for call in answer.calls] == functions and answer.calls[0].values == {"city": "Rome"}
    assert answer.choices[0].finish_reason is FinishReason.TOOL_CALLS
    assert answer.usage.reasoning_tokens == len("<think>hm</think>")


async def test_tool_call_parts_are_streamed_as_they_are_written(gateway: Gateway, baton: AsyncBatonClient) -> None:
    await gateway.thinks(f"<think>hm</think>{CALL}")

    events = [event async for event in baton.chat(ASKED, tools=TOOLS, max_tokens=300)]

    kinds = [type(event) for event in events if not isinstance(event, Delta)]
    assert kinds.count(ThoughtPart) == 2 and kinds.count(CallBegins) == 1 and kinds.count(CallPart) > 5
    assert kinds.index(ThoughtPart) < kinds.index(CallBegins) < kinds.index(CallPart)


async def test_loop_of_tools_gives_the_model_the_prompt_of_http(gateway: Gateway, baton: AsyncBatonClient) -> None:
    gateway.says(f"I look.{CALL}")
    weather = Tool("weather", parameters=PARAMETERS)
    messages: list[Message] = [Message("user", "hi")]
    answer = await baton.complete_chat(messages, tools=[weather], max_tokens=200)
    messages += [answer.message, *(call.result("sunny") for call in answer.calls)]
    await baton.complete_chat(messages, tools=[weather], max_tokens=2)
    prompt = gateway.prompt()

    (call,) = answer.calls
    function = {"name": call.name, "arguments": call.arguments}
    turns: list[dict[str, Any]] = [
        *ASKED,
        {"role": "assistant", "content": "I look.", "tool_calls": [{"id": call.id, "function": function}]},
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    await gateway.post(PATH, messages=turns, tools=TOOLS, max_tokens=2)
    assert prompt == gateway.prompt() and "[tool]sunny" in prompt and '"city": "Rome"' in prompt


async def test_workers_are_asked_the_same_as_over_http(gateway: Gateway, baton: AsyncBatonClient) -> None:
    await gateway.thinks("x")
    named = {"type": "function", "function": {"name": "weather"}}
    both: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"tools": TOOLS, "tool_choice": "required"}, {}),
        ({"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}, {}),
        ({"tools": TOOLS, "tool_choice": "weather"}, {"tool_choice": named}),
        ({"tools": TOOLS, "tool_choice": "none"}, {}),
        ({"thinking_budget": 3}, {}),
        ({"reasoning_effort": "none"}, {}),
        ({"enable_thinking": False}, {}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {}),
        ({"json_object": True}, {"response_format": {"type": "json_object"}, "json_object": None}),
    ]
    for asked, differing in both:
        over_http = {name: value for name, value in {**asked, **differing}.items() if value is not None}
        await gateway.post(PATH, messages=ASKED, max_tokens=2, **over_http)
        prompt, sampling = gateway.prompt(), gateway.prefill.sampling
        options: Any = {**asked, "parts": True}
        await baton.complete_chat(ASKED, max_tokens=2, **options)

        assert gateway.prompt() == prompt, asked
        assert gateway.prefill.sampling.structured == sampling.structured, asked


async def test_grpc_rejects_the_same_fields_as_http(baton: AsyncBatonClient) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "time"}, "tool_choice.function.name"),
        ({"tools": TOOLS * 1025}, "tools"),
        (
            {"tools": [Tool("f", parameters={"type": "object", "oneOf": 1})], "tool_choice": "required"},
            "tools[0].function.parameters",
        ),
        ({"tools": [Tool("")]}, "tools[0].function.name"),
        ({"thinking_budget": 3}, "thinking_budget"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"tone": 1}}, "chat_template_kwargs.tone"),
    ]
    for asked, field in wrong:
        options: Any = asked
        with pytest.raises(InvalidRequest) as refused:
            await baton.complete_chat(ASKED, max_tokens=2, **options)
        assert refused.value.details.field == field, asked


async def test_malformed_parameters_are_rejected_by_field(gateway: Gateway) -> None:
    tool = baton_pb2.Tool(function=baton_pb2.Function(name="weather", parameters="{"))
    request = baton_pb2.ChatRequest(messages=[baton_pb2.ChatMessage(role="user", content="hi")], tools=[tool])
    async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.process.running.ports[0]}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await baton_pb2_grpc.BatonServiceStub(channel).Chat(request).read()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "tools[0].function.parameters" in str(refused.value.details())


async def test_vectors_and_scores_equal_those_of_http(gateway: Gateway, baton: AsyncBatonClient) -> None:
    body = await gateway.post("/v1/embeddings", input=["hi", "ho!"], dimensions=2)
    embedded = await baton.embed(["hi", "ho!"], dimensions=2)
    over_http = [each["embedding"] for each in body["data"]]
    assert [list(each) for each in embedded.vectors] == [pytest.approx(each) for each in over_http]
    assert embedded.usage.prompt_tokens == body["usage"]["prompt_tokens"]

    body = await gateway.post("/v1/score", text_1="hi", text_2=["ho!", "hu"])
    scored = await baton.score("hi", ["ho!", "hu"])
    assert list(scored.scores) == pytest.approx([each["score"] for each in body["data"]])


async def test_without_parts_thoughts_are_text_as_before(gateway: Gateway, baton: AsyncBatonClient) -> None:
    await gateway.thinks("<think>hm</think>yes")
    answer = await baton.complete_chat(ASKED, max_tokens=100)
    assert (answer.text, answer.thoughts) == ("<think>hm</think>yes", "")


async def test_stream_in_parts_is_resumed_where_it_broke(gateway: Gateway) -> None:
    await gateway.thinks(f"<think>hm</think>I look.{CALL}")
    function = baton_pb2.Function(name="weather", parameters=json.dumps(PARAMETERS))
    request = baton_pb2.ChatRequest(
        messages=[baton_pb2.ChatMessage(role="user", content="hi")],
        tools=[baton_pb2.Tool(function=function)],
        sampling=baton_pb2.SamplingParams(max_tokens=300, seed=1),
    )
    async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.process.running.ports[0]}") as channel:
        stub = baton_pb2_grpc.BatonServiceStub(channel)
        whole = [event_from(each) async for each in stub.Chat(request)]
        for cut in (2, 30, len(whole) - 12):
            had = Continuity(1)
            for event in whole[:cut]:
                had.accept(event)
            received = had.received[0]
            choice = baton_pb2.ReceivedChoice(
                token_ids=received.token_ids, text_bytes=received.text_bytes, calls=received.calls
            )
            assert had.started is not None
            names = {"request_id": had.started.request_id, "resume_token": had.started.resume_token}
            again = baton_pb2.ResumeRequest(**names, choices=[choice], chat=request)
            async for response in stub.Resume(again):
                if response.WhichOneof("event") != "started":
                    had.accept(event_from(response))
            had.end()
            everything = "hmI look." + '{"city": "Rome"}'
            assert (had.received[0].text_bytes, had.received[0].calls) == (len(everything), 1)


def test_message_of_openai_s_clients_is_a_turn() -> None:
    call = ToolCall("1", "weather", "{}")
    assert call.result("x") == Message("tool", "x", tool_call_id="1")
