"""Grammars of tools with free text, in calls that the request forces."""

from typing import Any

import pytest

from tests.router.http.conftest import Gateway

LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "a" | "b"'}
REGEX = {"type": "grammar", "syntax": "regex", "definition": "[ab]+"}
CHOICE = {"type": "custom", "name": "patch"}


def tools(form: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "custom", "name": "patch", "format": form}, {"type": "function", "name": "read"}]


@pytest.mark.parametrize("form", [LARK, REGEX])
async def test_forced_call_follows_the_grammar(gateway: Gateway, form: dict[str, Any]) -> None:
    gateway.says('{"input": "a"}')  # a text that must not be read as JSON
    answer = await gateway.post("/v1/responses", input="go", tools=tools(form), tool_choice=CHOICE)
    [call] = answer["output"]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "patch", '{"input": "a"}')
    assert gateway.prefill.sampling.structured.text == form["definition"]


async def test_only_tool_is_forced_by_required(gateway: Gateway) -> None:
    gateway.says("ab")
    answer = await gateway.post("/v1/responses", input="go", tools=tools(REGEX)[:1], tool_choice="required")
    assert answer["output"][0]["input"] == "ab"


async def test_grammar_among_several_required_tools_is_rejected(gateway: Gateway) -> None:
    error = await gateway.refused("/v1/responses", input="go", tools=tools(LARK), tool_choice="required")
    assert error["param"] == "tools[0]"


async def test_grammar_that_cannot_be_enforced_is_rejected(gateway: Gateway) -> None:
    form = {**LARK, "definition": "start: missing"}
    error = await gateway.refused("/v1/responses", input="go", tools=tools(form), tool_choice=CHOICE)
    assert error["param"].startswith("tools")


async def test_unknown_syntax_is_rejected(gateway: Gateway) -> None:
    error = await gateway.refused("/v1/responses", input="go", tools=tools({**LARK, "syntax": "gbnf"}))
    assert error["param"] == "tools[0].format.syntax"


async def test_free_call_with_a_grammar_stays_json(gateway: Gateway) -> None:
    gateway.says('<tool_call>{"name": "patch", "arguments": {"input": "a"}}</tool_call>')
    answer = await gateway.post("/v1/responses", input="go", tools=tools(LARK))
    assert answer["output"][0]["input"] == "a"
