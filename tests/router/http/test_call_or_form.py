"""Tools and a form of the answer together: the model calls, or answers in the form, in every dialect."""

import asyncio
import json
from typing import Any

import pytest

from baton.client import AsyncBatonClient, Tool
from baton.router.fleet.wire import STRUCTURED_KINDS
from baton.text.structured.library import Vocabulary, compile_form, take_tokens
from baton.text.structured.output import StructuredOutput
from baton.text.structured.thoughts import form_of
from tests.fixtures.client_environment import problems
from tests.router.http.conftest import WAIT_S, Gateway
from tests.router.tokenizers_for_tests import END, byte_level

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
FLAT = [{"type": "function", **FUNCTION}]
USE = [{"name": "weather", "input_schema": PARAMETERS}]
SAID = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ANSWER = '{"name":"Vera <tool_call>","age":34}'
GRAMMAR = 'start: "is " what // start\nwhat: "start" | /st[a]rt\\/x/'
CHAT = "/v1/chat/completions"
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "response_format": (CHAT, {"messages": SAID, "tools": TOOLS, "response_format": SCHEMA}),
    "guided_json": (CHAT, {"messages": SAID, "tools": TOOLS, "guided_json": PERSON}),
    "structured_outputs": (CHAT, {"messages": SAID, "tools": TOOLS, "structured_outputs": {"json": PERSON}}),
    "responses": ("/v1/responses", {"input": "hi", "tools": FLAT, "text": {"format": {"type": "json_schema", "name": "p", "schema": PERSON}}}),  # noqa: E501
    "anthropic": ("/v1/messages", {"messages": SAID, "max_tokens": 300, "tools": USE, "output_config": {"format": {"type": "json_schema", "schema": PERSON}}}),  # noqa: E501
    "ollama": ("/api/chat", {"messages": SAID, "stream": False, "tools": TOOLS, "format": PERSON}),
}  # fmt: skip


KINDS = {theirs: ours for ours, theirs in STRUCTURED_KINDS.items()}
BYTES = byte_level()
END_ID = BYTES.token_to_id(END) or 0
VOCABULARY = Vocabulary(BYTES.to_str(), BYTES.get_vocab_size(), [END_ID])


def lets_through(gateway: Gateway, *texts: str) -> list[bool]:
    """Whether the form that the workers got lets each text through, as a whole answer."""
    sent = gateway.prefill.sampling.structured
    form = form_of(StructuredOutput(KINDS[sent.kind], sent.text))
    assert form is not None
    found = []
    for text in texts:
        matcher, token_ids = compile_form(form, VOCABULARY), BYTES.encode(text, add_special_tokens=False).ids
        if taken := matcher.validate_tokens(token_ids) == len(token_ids):
            take_tokens(matcher, token_ids)
        found.append(taken and matcher.is_accepting())
    return found


@pytest.mark.parametrize("dialect", ASKED)
async def test_answer_is_a_call_or_in_the_form(gateway: Gateway, dialect: str) -> None:
    path, body = ASKED[dialect]
    gateway.says(CALL)
    called = await gateway.post(path, **body)
    gateway.says(ANSWER)
    answered = await gateway.post(path, **body)

    assert parts_of(dialect, called) == ([{"city": "Rome"}], "")
    assert parts_of(dialect, answered) == ([], ANSWER)
    assert "weather" in gateway.prompt()
    assert lets_through(gateway, CALL, f"{CALL}\n{CALL}", ANSWER) == [True, True, True]
    wrong = ("sunny", '{"name":"Vera"}', CALL.replace("city", "town"), f"{ANSWER}{CALL}", f"I look. {CALL}", "")
    assert lets_through(gateway, *wrong) == [False] * len(wrong)


def parts_of(dialect: str, answer: Any) -> tuple[list[Any], str]:
    """Arguments of its calls, and its text."""
    match dialect:
        case "responses":
            calls = [json.loads(item["arguments"]) for item in answer["output"] if item["type"] == "function_call"]
            texts = [item["content"][0]["text"] for item in answer["output"] if item["type"] == "message"]
            return calls, "".join(texts)
        case "anthropic":
            calls = [block["input"] for block in answer["content"] if block["type"] == "tool_use"]
            return calls, "".join(block["text"] for block in answer["content"] if block["type"] == "text")
        case "ollama":
            calls = [call["function"]["arguments"] for call in answer["message"].get("tool_calls", ())]
            return calls, answer["message"]["content"]
    message = answer["choices"][0]["message"]
    calls = [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return calls, message["content"] or ""


async def test_stream_has_the_call_or_the_answer(gateway: Gateway) -> None:
    path, body = ASKED["response_format"]
    gateway.says(CALL, ANSWER)

    choices = [chunk["choices"][0] for chunk in await gateway.stream(path, **body, n=2)]

    arguments = [call["function"]["arguments"] for each in choices for call in each["delta"].get("tool_calls", ())]
    assert json.loads("".join(arguments)) == {"city": "Rome"}
    assert "".join(each["delta"].get("content", "") for each in choices if each["index"] == 1) == ANSWER
    assert {each["index"]: each["finish_reason"] for each in choices} == {0: "tool_calls", 1: "stop"}


async def test_grpc_answer_is_a_call_or_the_form(gateway: Gateway) -> None:
    async with AsyncBatonClient(f"127.0.0.1:{gateway.process.running.ports[0]}", timeout_s=WAIT_S) as client:
        asked: Any = {"tools": [Tool("weather", parameters=PARAMETERS)], "json_schema": PERSON}
        gateway.says(CALL)
        called = await client.complete_chat(SAID, **asked)
        gateway.says(ANSWER)
        answered = await client.complete_chat(SAID, **asked)

    assert lets_through(gateway, CALL, ANSWER, "sunny") == [True, True, False]
    assert [call.values for call in called.calls] == [{"city": "Rome"}]
    assert (answered.calls, answered.text) == ((), ANSWER)


AGES = {"Vera Stone": 34, "Maria Garcia": 51, "Wei Zhang": 27}


def looks_up(prompt: list[int], choice: int) -> list[int]:
    """A model that looks a person up, and then says who it is in the form that was asked for."""
    question = BYTES.decode(prompt).rpartition("[user]")[2]
    name = next(name for name in AGES if name in question)
    call = f'<tool_call>\n{{"name": "lookup", "arguments": {{"name": "{name}"}}}}\n</tool_call>'
    said = json.dumps({"name": name, "age": AGES[name]}, separators=(",", ":")) if "[tool]" in question else call
    return [*BYTES.encode(said).ids, END_ID]


@pytest.mark.parametrize(
    ("client", "scenarios"),
    [
        ("openai_agents_client", ["chat_typed", "responses_typed"]),
        ("pydantic_ai_client", ["output_by_a_schema_after_a_tool"]),
    ],
)
async def test_agents_with_a_tool_and_an_output_type_get_both(
    gateway: Gateway, client: str, scenarios: list[str]
) -> None:
    gateway.pair.script = looks_up

    assert await asyncio.to_thread(problems, client, f"http://127.0.0.1:{gateway.port}", scenarios) == []

    answer = '{"name":"Vera Stone","age":34}'
    call = '<tool_call>\n{"name": "lookup", "arguments": {"name": "Vera Stone"}}\n</tool_call>'
    assert lets_through(gateway, call, answer, "Vera Stone is 34.") == [True, True, False]


CHOICES: list[tuple[dict[str, Any], list[bool]]] = [  # a call, two calls, the form
    ({"tool_choice": "auto"}, [True, True, True]),
    ({"tool_choice": "auto", "parallel_tool_calls": False}, [True, False, True]),
    ({"tool_choice": "required"}, [True, True, False]),
    ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, [True, False, False]),
    ({"tool_choice": "none"}, [False, False, True]),
]


async def test_tool_choice_says_which_of_both_may_come(gateway: Gateway) -> None:
    path, body = ASKED["response_format"]
    for choice, let_through in CHOICES:
        await gateway.post(path, **body, **choice)
        assert lets_through(gateway, CALL, f"{CALL}\n{CALL}", ANSWER) == let_through, choice


FORMS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"response_format": {"type": "json_object"}}, ['{"a":[1]}'], ["[1]"]),
    ({"guided_regex": "[a-z]+/[0-9]{2}"}, ["ab/12"], ["ab/1", "ab"]),
    ({"guided_choice": ["yes", 'no, "never"']}, ["yes", 'no, "never"'], ["maybe"]),
    ({"guided_grammar": GRAMMAR}, ["is start", "is start/x"], ["is"]),
]


async def test_every_kind_of_form_goes_with_tools(gateway: Gateway) -> None:
    for form, answers, others in FORMS:
        await gateway.post(CHAT, messages=SAID, tools=TOOLS, **form)
        assert lets_through(gateway, CALL, *answers) == [True] * (1 + len(answers)), form
        assert lets_through(gateway, *others, "", "sunny?") == [False] * (2 + len(others)), form


async def test_model_may_think_before_a_call_or_the_form(gateway: Gateway) -> None:
    await gateway.thinks(f"<think>Hm.</think>\n\n{CALL}", f"<think>Hm.</think>\n\n{ANSWER}")

    choices = (await gateway.post(CHAT, messages=SAID, tools=TOOLS, response_format=SCHEMA, n=2))["choices"]

    assert lets_through(gateway, f"\n\n{CALL}", f"\n\n{ANSWER}", ANSWER) == [True] * 3
    called, answered = (choice["message"] for choice in choices)
    assert called["reasoning_content"] == answered["reasoning_content"] == "Hm."
    assert called["tool_calls"][0]["function"]["name"] == "weather" and called["content"] is None
    assert answered["content"] == ANSWER and "tool_calls" not in answered


async def test_parameters_that_cannot_be_held_leave_the_arguments_free(gateway: Gateway) -> None:
    function = {"name": "weather", "parameters": {**PARAMETERS, "not": {"required": ["town"]}}}
    tools = [{"type": "function", "function": function}]
    body: dict[str, Any] = {"messages": SAID, "tools": tools, "response_format": SCHEMA}

    await gateway.post(CHAT, **body)
    error = await gateway.refused(CHAT, **body, tool_choice="required")

    assert lets_through(gateway, CALL, CALL.replace("city", "town"), ANSWER) == [True, True, True]
    assert error["param"] == "tools[0].function.parameters" and "#/not" in error["message"]


REFERRING = {"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"a": {"$ref": "#/$defs/B"}}}, "B": {}}}
ARGUMENTS: list[tuple[dict[str, Any], str, str]] = [  # function, arguments that fit, arguments that do not
    ({}, "{}", '{"a": 1}'),
    ({"parameters": {}}, '{"a": 1}', "63"),
    ({"parameters": True}, '{"a": 1}', "true"),
    ({"parameters": {"anyOf": [{"type": "string"}, {"required": ["a"]}]}}, '{"a": 1}', '"x"'),
    ({"parameters": {"type": ["object", "null"]}}, '{"a": 1}', "null"),
    ({"parameters": {"properties": {"a": {"type": "integer"}}}}, '{"a": 1}', "585.42"),
    ({"parameters": REFERRING}, '{"a": 1}', "[]"),
]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
async def test_forced_arguments_are_an_object(gateway: Gateway, choice: Any) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'
    for given, good, wrong in ARGUMENTS:
        tools = [{"type": "function", "function": {"name": "f", **given}}]
        await gateway.post(CHAT, messages=SAID, tools=tools, tool_choice=choice)
        assert lets_through(gateway, call % good, call % wrong) == [True, False], given
