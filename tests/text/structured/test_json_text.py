"""JSON inside JSON: what is refused, and what a model's arguments become."""

import json

import pytest

from baton.text.output.tool_calls import arguments_object
from baton.text.structured.json_text import MAX_DEPTH, JsonRefused, read_arguments, read_json

DEEP = '{"a":' * 2000 + "1" + "}" * 2000


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (DEEP, "levels deep"),
        ("[" * 200_000, "levels deep"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "levels deep"),
        (r'{"a": "\ud83d"}', "surrogate"),
        (r'{"a": "\ude00\ud83d"}', "surrogate"),
        ('{"a": NaN}', "NaN"),
        ('{"a": -Infinity}', "-Infinity"),
        ('{"a": 1e999}', "out of range"),
        ("1" * 5000, "digits"),
        ('{"a": 1, "b": 2, "a": 3}', "'a' twice"),
        ('{"a": }', "line 1, column 7"),
        ("", "line 1, column 1"),
    ],
)
def test_read_json_of_a_text_that_cannot_be_served_says_why(text: str, reason: str) -> None:
    with pytest.raises(JsonRefused, match=reason):
        read_json(text)


@pytest.mark.parametrize(
    "text",
    [
        "[" * MAX_DEPTH + "]" * MAX_DEPTH,
        json.dumps("[" * 5000),  # brackets in a text nest nothing
        json.dumps({"a": '"[' * 300}),
        r'{"a": "\ud83d\ude00"}',
        r'{"a": "\\ud83d"}',  # a backslash and letters
        "1" * 4300,
        '{"a": 1.5, "b": null}',
    ],
)
def test_read_json_of_valid_text_equals_json(text: str) -> None:
    assert read_json(text) == json.loads(text)


def test_read_arguments_with_half_a_surrogate_pair_replaces_it() -> None:
    read = read_arguments(r'{"a": "x\ud83dy", "b": "\ud83d\ude00", "c": "\\ud83d"}')

    assert read == {"a": "x\ufffdy", "b": "😀", "c": r"\ud83d"}
    json.dumps(read, ensure_ascii=False).encode()


@pytest.mark.parametrize("text", [DEEP, "63", "[1]", '{"a": 1e999}', '{"a": ', "null"])
def test_non_object_arguments_are_shown_unchanged(text: str) -> None:
    assert read_arguments(text) is None
    assert arguments_object(text) == {"_raw": text}
