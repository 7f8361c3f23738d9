"""Forms of answers through the router: what workers are told, and what is refused before any of them hears of it."""

from typing import Any

from baton.protos import baton_pb2, sampling_pb2
from tests.router.conftest import Stack

SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"}},"additionalProperties":false}'


FORMS: list[tuple[dict[str, Any], str, str]] = [
    ({"json_schema": SCHEMA}, "JSON_SCHEMA", SCHEMA),
    ({"json_object": True}, "JSON_OBJECT", ""),
    ({"regex": "a+"}, "REGEX", "a+"),
    ({"grammar": 'start: "a"'}, "GRAMMAR", 'start: "a"'),
    ({"choice": baton_pb2.Texts(texts=["yes", "nö"])}, "CHOICE", '["yes", "nö"]'),
]


async def test_both_workers_are_told_the_form(stack: Stack) -> None:
    for count, (asked, kind, text) in enumerate(FORMS, 1):
        await stack.generate(max_tokens=2, **asked)
        number: Any = sampling_pb2.StructuredKind.Value(f"STRUCTURED_KIND_{kind}")
        expected = sampling_pb2.StructuredOutput(kind=number, text=text)
        for worker, command in ((stack.prefill, "prefill"), (stack.decode, "start")):
            assert (await worker.received(command, count)).sampling.structured == expected


async def test_a_false_json_object_asks_for_nothing(stack: Stack) -> None:
    await stack.generate(max_tokens=2, json_object=False)
    assert not (await stack.decode.received("start")).sampling.HasField("structured")
