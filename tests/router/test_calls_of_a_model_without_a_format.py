"""Calls of a model that has no format for them are JSON whose schema has those of the tools in it."""

from baton.router.public.tools import _calls_schema
from baton.text.structured.schema import enforceable_schema

CITY = {"type": "object", "properties": {"city": {"$ref": "#/$defs/Name"}}, "$defs": {"Name": {"type": "string"}}}


def test_calls_schema_with_definitions_of_two_tools_can_be_held() -> None:
    numbers = {**CITY, "$defs": {"Name": {"type": "integer"}}}
    held = enforceable_schema(_calls_schema({"a": enforceable_schema(CITY), "b": enforceable_schema(numbers)}, None))
    kinds = []
    for call in held["items"]["anyOf"]:
        reference = call["properties"]["parameters"]["properties"]["city"]["$ref"]
        kinds.append(held["$defs"][reference.removeprefix("#/$defs/")]["type"])
    assert kinds == ["string", "integer"]
