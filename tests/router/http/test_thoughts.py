"""What a model thinks, from what it writes to what the client gets."""

from typing import Any

import pytest

from baton.protos import sampling_pb2
from baton.text.output.formats.hermes import HermesReader
from baton.text.output.pieces import CallArguments, CallStart, Thought
from baton.text.output.thoughts import OutputParser, ThoughtParser, thoughts_of
from baton.text.structured.output import StructuredKind, StructuredOutput
from baton.text.structured.thoughts import Thoughts
from baton.text.structured.thoughts import thoughts_of as thoughts_in
from tests.router.http.conftest import QWEN3, Gateway

PATH = "/v1/chat/completions"
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
TEXTS: list[tuple[bool, str, str, str]] = [  # opened by the template, text, thoughts, answer
    (False, "<think>\nHm. 1 < 2\n</think>\n\nTwo.", "Hm. 1 < 2", "Two."),
    (False, "\n<think>a\n\nb</think>c", "a\n\nb", "c"),
    (False, "<think>\n\n</think>\n\nNo thoughts.", "", "No thoughts."),
    (False, "Plain <think>not a thought</think>", "", "Plain <think>not a thought</think>"),
    (False, "  indented", "", "  indented"),
    (False, "<thin ice>", "", "<thin ice>"),
    (False, "<think", "", "<think"),
    (False, "", "", ""),
    (False, "<think>never ends </thi", "never ends </thi", ""),
    (False, "<think>ends early \n", "ends early", ""),
    (True, "Hm.\n</think>\n\nTwo. </think>\n", "Hm.", "Two. </think>\n"),
    (True, "\n</think>\n\nTwo.", "", "Two."),
    (True, "</think>", "", ""),
    (True, "all a thought", "all a thought", ""),
]  # fmt: skip


def read(parser: ThoughtParser, pieces: list[str]) -> tuple[str, str]:
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    thoughts = "".join(part.text for part in parts if isinstance(part, Thought))
    assert all(part if isinstance(part, str) else part.text for part in parts), "an empty piece"
    return thoughts, "".join(part for part in parts if isinstance(part, str))


@pytest.mark.parametrize(("opened", "text", "thoughts", "answer"), TEXTS)
def test_thoughts_and_answer_are_separated_for_any_cut(opened: bool, text: str, thoughts: str, answer: str) -> None:
    assert read(ThoughtParser(opened), list(text)) == (thoughts, answer)
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            cut = [text[:first], text[first:second], text[second:]]
            assert read(ThoughtParser(opened), cut) == (thoughts, answer), cut


def test_thought_goes_out_while_it_is_thought() -> None:
    parser = ThoughtParser(opened=False)
    assert parser.push("<think>Hm") == [Thought("Hm")]
    assert parser.push(", so </th") == [Thought(", so")]
    assert parser.push("ere") == [Thought(" </there")]


def test_calls_are_read_after_thoughts_and_not_in_them() -> None:
    parser = OutputParser(ThoughtParser(opened=True), HermesReader({}))
    pieces = parser.push(f"I could {CALL}.</think>{CALL}", 30) + parser.finish()
    assert pieces[0] == Thought(f"I could {CALL}.")
    assert [type(piece) for piece in pieces[1:]] == [CallStart, CallArguments]
    assert parser.calls == 1


def test_tokens_of_thoughts_are_counted_up_to_the_last_tag() -> None:
    parser = OutputParser(ThoughtParser(opened=False), None)
    for text, tokens in (("<think>", 1), ("a b", 2), ("</think>", 1), ("c", 1), ("d", 1)):
        parser.push(text, tokens)
    assert parser.thought_tokens == 4


@pytest.mark.parametrize(
    ("ending", "opened"), [("<a>", False), ("<a><think>\n", True), ("<a><think>\n\n</think>\n\n", False)]
)
def test_template_says_whether_the_prompt_ends_in_a_thought(ending: str, opened: bool) -> None:
    make = thoughts_of("... </think> ...", ending)
    assert make is not None
    assert make().has_thought is opened


def test_models_without_thoughts_in_the_template_have_none() -> None:
    assert thoughts_of("{{ messages }}", "<think>") is None


ALWAYS = "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}[assistant]<think>"


async def test_whole_answer_has_thoughts_apart(gateway: Gateway) -> None:
    await gateway.thinks("<think>\nHm.\n</think>\n\nTwo.")

    answer = await gateway.post(PATH, **ASKED)

    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Two.")
    details = answer["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": len("<think>\nHm.\n</think>")}, "a token is a byte here"


async def test_stream_has_thoughts_apart(gateway: Gateway) -> None:
    await gateway.thinks("<think>Hm.</think>Two.", "One.")

    chunks = await gateway.stream(PATH, **ASKED, n=2, stream_options={"include_usage": True})

    deltas: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            deltas[choice["index"]].append(choice["delta"])
    parts = [("".join(d.get("reasoning_content", "") for d in each), "".join(d.get("content", "") for d in each))
            for each in deltas.values()]  # fmt: skip
    assert parts == [("Hm.", "Two."), ("", "One.")]
    assert chunks[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("<think>Hm.</think>")}


async def test_text_held_back_to_the_end_is_not_lost(gateway: Gateway) -> None:
    await gateway.thinks("<think>Hm.</think>Two <tool_ca", "<think>Hm </thi")

    choices = (await gateway.post(PATH, **ASKED, n=2))["choices"]

    assert choices[0]["message"]["content"] == "Two <tool_ca"
    assert choices[1]["message"]["reasoning_content"] == "Hm </thi"


async def test_thoughts_that_are_not_wanted_are_left_out(gateway: Gateway) -> None:
    await gateway.thinks("<think>Hm.</think>Two.")

    message = (await gateway.post(PATH, **ASKED, include_reasoning=False))["choices"][0]["message"]

    assert message["content"] == "Two." and "reasoning_content" not in message


OPENED = "{{ messages[0].content }}<think>"
CHANNELS = "{{ messages[0].content }}<|start|>assistant{# <|channel|> #}"
OBJECT = {"response_format": {"type": "json_object"}}
BEHIND = StructuredOutput(StructuredKind.JSON_OBJECT)
FINAL = "<|channel|>final<|message|>"
BOUNDS: list[tuple[str, dict[str, Any], Thoughts | None]] = [
    (QWEN3, {"thinking_budget": 5}, Thoughts("<think>", ("</think>",), "\n</think>", 5)),
    (QWEN3, {"thinking_token_budget": 0}, Thoughts("<think>", ("</think>",), "\n</think>", 0)),
    (QWEN3, {"thinking_budget": 5, "enable_thinking": False}, None),
    (QWEN3, {}, None),
    (OPENED, {"thinking_budget": 5}, Thoughts("", ("</think>",), "\n</think>", 5)),
    (OPENED, OBJECT, Thoughts("", ("</think>",), "\n</think>", None, BEHIND)),
    (OPENED, {**OBJECT, "thinking_budget": 7}, Thoughts("", ("</think>",), "\n</think>", 7, BEHIND)),
    (
        CHANNELS,
        {"thinking_budget": 5},
        Thoughts("", (FINAL, "<|channel|>commentary"), f"<|end|><|start|>assistant{FINAL}", 5),
    ),
    (CHANNELS, OBJECT, Thoughts("", (FINAL,), f"<|end|><|start|>assistant{FINAL}", None, BEHIND)),
]


async def test_workers_receive_the_thinking_budget(gateway: Gateway) -> None:
    for template, fields, bound in BOUNDS:
        await gateway.thinks("{}", template=template)
        await gateway.post(PATH, **ASKED, **fields)
        sent = gateway.prefill.sampling
        assert sent.HasField("structured") is (bound is not None), fields
        if bound is not None:
            assert sent.structured.kind == sampling_pb2.STRUCTURED_KIND_THOUGHTS
            assert thoughts_in(StructuredOutput(StructuredKind.THOUGHTS, sent.structured.text)) == bound


async def test_form_is_behind_the_thoughts(gateway: Gateway) -> None:
    in_channels = f'<|channel|>analysis<|message|>Hm.{FINAL}{{"a": 1}}'
    for template, answer in ((OPENED, 'Hm.</think>{"a": 1}'), (CHANNELS, in_channels)):
        await gateway.thinks(answer, template=template)
        message = (await gateway.post(PATH, **ASKED, **OBJECT))["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", '{"a": 1}')


async def test_forced_function_is_called_after_the_thoughts(gateway: Gateway) -> None:
    await gateway.thinks('Hm.</think>{"a": 1}', template="{{ tools }}" + OPENED)
    tool = {"type": "function", "function": {"name": "f"}}

    choice = {"type": "function", "function": {"name": "f"}}
    message = (await gateway.post(PATH, **ASKED, tools=[tool], tool_choice=choice))["choices"][0]["message"]

    assert message["reasoning_content"] == "Hm." and message["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


async def test_answer_without_thoughts_has_its_form_immediately(gateway: Gateway) -> None:
    await gateway.thinks('{"a": 1}')

    message = (await gateway.post(PATH, **ASKED, **OBJECT, enable_thinking=False))["choices"][0]["message"]

    assert message["content"] == '{"a": 1}' and "reasoning_content" not in message
    assert gateway.prefill.sampling.structured.kind == sampling_pb2.STRUCTURED_KIND_JSON_OBJECT


async def test_budget_of_anthropic_clients_is_kept(gateway: Gateway) -> None:
    await gateway.thinks("<think>Hm.</think>Two.")
    fields = {"model": "", "messages": ASKED["messages"], "max_tokens": 200}

    await gateway.post("/v1/messages", **fields, thinking={"type": "enabled", "budget_tokens": 9})

    sent = gateway.prefill.sampling.structured
    assert thoughts_in(StructuredOutput(StructuredKind.THOUGHTS, sent.text)).budget == 9


THINKING: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({"enable_thinking": False}, False),
    ({"enable_thinking": True}, True),
    ({"reasoning_effort": "none"}, False),
    ({"reasoning_effort": "low"}, True),
    ({"chat_template_kwargs": {"enable_thinking": False}}, False),
]


async def test_template_is_asked_to_think_or_not(gateway: Gateway) -> None:
    await gateway.thinks("Two.")
    for fields, thinks in THINKING:
        await gateway.post(PATH, **ASKED, **fields)
        assert gateway.prompt().endswith("[assistant]") is thinks, fields


async def test_model_that_cannot_choose_refuses_to(gateway: Gateway) -> None:
    await gateway.thinks("Two.", template=ALWAYS)
    error = await gateway.refused(PATH, **ASKED, enable_thinking=False)
    assert error["param"] == "enable_thinking"


async def test_earlier_thoughts_reach_the_template(gateway: Gateway) -> None:
    await gateway.thinks("Two.")
    for field in ("reasoning_content", "reasoning"):
        said = {"role": "assistant", "content": "One.", field: "Hm."}
        await gateway.post(PATH, messages=[*ASKED["messages"], said, *ASKED["messages"]])
        assert gateway.prompt() == "[user]hi[assistant]<think>Hm.</think>One.[user]hi[assistant]"
