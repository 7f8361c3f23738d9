"""Forms of answers through the router: what workers are told, and what is refused before any of them hears of it."""

from typing import Any

import pytest

from baton.protos import baton_pb2, sampling_pb2
from tests.router.conftest import Stack
from tests.router.test_router_refusals import INVALID, fields_of, refusal, sampling

SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"}},"additionalProperties":false}'


@pytest.mark.parametrize(
    ("asked", "kind", "text"),
    [
        ({"json_schema": SCHEMA}, "JSON_SCHEMA", SCHEMA),
        ({"json_object": True}, "JSON_OBJECT", ""),
        ({"regex": "a+"}, "REGEX", "a+"),
        ({"grammar": 'start: "a"'}, "GRAMMAR", 'start: "a"'),
        ({"choice": baton_pb2.Texts(texts=["yes", "nö"])}, "CHOICE", '["yes", "nö"]'),
    ],
)
async def test_both_workers_are_told_the_form(stack: Stack, asked: dict[str, Any], kind: str, text: str) -> None:
    await stack.generate(max_tokens=2, **asked)
    number: Any = sampling_pb2.StructuredKind.Value(f"STRUCTURED_KIND_{kind}")
    expected = sampling_pb2.StructuredOutput(kind=number, text=text)
    for worker, command in ((stack.prefill, "prefill"), (stack.decode, "start")):
        assert (await worker.received(command)).sampling.structured == expected


async def test_a_false_json_object_asks_for_nothing(stack: Stack) -> None:
    await stack.generate(max_tokens=2, json_object=False)
    assert not (await stack.decode.received("start")).sampling.HasField("structured")


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"json_schema": "{"}, "sampling.json_schema"),
        ({"json_schema": '{"type": "nothing"}'}, "sampling.json_schema"),
        ({"regex": "(a"}, "sampling.regex"),
        ({"regex": "x" * 70_000}, "sampling.regex"),
        ({"grammar": "x"}, "sampling.grammar"),
        ({"choice": baton_pb2.Texts()}, "sampling.choice"),
        ({"choice": baton_pb2.Texts(texts=["a"] * 1001)}, "sampling.choice"),
        ({"regex": "a", "ignore_eos": True}, "sampling.ignore_eos"),
        ({"regex": "a", "beam_width": 2}, "sampling.beam_width"),
        ({"regex": "a", "allowed_token_ids": [5]}, "sampling.allowed_token_ids"),
        ({"regex": "(((a{1000}){1000}){1000}){1000}"}, "sampling.regex"),
    ],
)
async def test_what_cannot_be_held_to_is_refused_by_its_field(stack: Stack, asked: dict[str, Any], field: str) -> None:
    await stack.ready()
    error = await refusal(stack.stub.Generate(sampling(**asked), timeout=20))
    assert error.code() is INVALID
    assert fields_of(error) == [field]
    told = [command.WhichOneof("command") for command in stack.prefill.commands]
    assert "prefill" not in told
