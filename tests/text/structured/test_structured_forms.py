"""What is refused without compiling anything; and that the library is loaded only where a form is asked for."""

import ast
import json
from pathlib import Path

import pytest

from baton.text.structured.output import (
    MAX_BYTES,
    MAX_CHOICES,
    FormRefused,
    StructuredKind,
    StructuredOutput,
    check_form,
)

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        (StructuredKind.JSON_SCHEMA, "{", "is not JSON"),
        (StructuredKind.JSON_SCHEMA, "[" * 200, "levels deep"),
        (StructuredKind.JSON_SCHEMA, "[]", "is not a JSON object"),
        (StructuredKind.JSON_SCHEMA, '{"x-guidance": {"whitespace_flexible": true}}', "x-guidance"),
        (StructuredKind.JSON_SCHEMA, json.dumps({"title": "x" * MAX_BYTES}), f"at most {MAX_BYTES} bytes"),
        (StructuredKind.JSON_OBJECT, "{}", "takes no text"),
        (StructuredKind.REGEX, "", "is empty"),
        (StructuredKind.GRAMMAR, "", "is empty"),
        (StructuredKind.REGEX, "ü" * (MAX_BYTES // 2 + 1), f"at most {MAX_BYTES} bytes"),
        (StructuredKind.CHOICE, "a", "not a list of texts"),
        (StructuredKind.CHOICE, "[1]", "not a list of texts"),
        (StructuredKind.CHOICE, "[]", "is empty"),
        (StructuredKind.CHOICE, '["a", ""]', "choice 1 is empty"),
        (StructuredKind.CHOICE, json.dumps(["a"] * (MAX_CHOICES + 1)), f"at most {MAX_CHOICES} choices"),
    ],
)
def test_form_that_means_nothing_is_refused(kind: StructuredKind, text: str, reason: str) -> None:
    with pytest.raises(FormRefused, match=reason):
        check_form(StructuredOutput(kind, text))


@pytest.mark.parametrize(
    "output",
    [
        StructuredOutput(StructuredKind.JSON_SCHEMA, "{}"),
        StructuredOutput(StructuredKind.JSON_OBJECT),
        StructuredOutput(StructuredKind.REGEX, "a"),
        StructuredOutput.choice(["a", "ü\n"]),
    ],
)
def test_form_that_may_mean_something_is_not(output: StructuredOutput) -> None:
    check_form(output)


def test_structured_output_names_its_public_field() -> None:
    assert StructuredOutput.choice(["a"]).field == "sampling.choice"


@pytest.mark.parametrize("folder", ["decode_worker", "engine", "prefill_worker", "router", "text", "worker"])
def test_package_imports_llguidance_inside_functions_alone(folder: str) -> None:
    """A machine without it serves all requests without a form."""
    paths = list((ROOT / folder).rglob("*.py"))
    imports = [
        ast.unparse(node)
        for path in paths
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert paths and not [line for line in imports if "llguidance" in line]
