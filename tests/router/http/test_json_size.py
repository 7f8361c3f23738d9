"""What is counted in a JSON text before it is parsed."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.router.http.edge.problem import Problem
from baton.router.http.messages import ChatRequest
from baton.router.http.parse import MAX_CONTAINERS, MAX_TEXTS, MAX_VALUES, JsonSize, json_size, parse

HOSTILE_TEXTS = st.text(alphabet='"\\[]{},:a', max_size=12)
JSON = st.recursive(
    st.none() | st.integers() | HOSTILE_TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(HOSTILE_TEXTS, inner, max_size=5),
    max_leaves=20,
)


def counted(value: Any) -> tuple[int, int]:
    """(texts and keys, containers)"""
    match value:
        case str():
            return 1, 0
        case list():
            parts = [counted(each) for each in value]
        case dict():
            parts = [counted(each) for item in value.items() for each in item]
        case _:
            return 0, 0
    return sum(part[0] for part in parts), 1 + sum(part[1] for part in parts)


@given(JSON)
@settings(max_examples=60, deadline=None)
def test_texts_and_containers_are_counted_despite_the_content_of_texts(value: Any) -> None:
    size = json_size(json.dumps(value).encode())

    assert (size.texts, size.containers) == counted(value)


def test_values_are_counted_outside_of_texts() -> None:
    assert json_size(b'[1, 2, "3,4,5"]') == JsonSize(values=3, texts=1, containers=1)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b'{"messages":[' + b"{}," * MAX_CONTAINERS + b"{}]}", "lists and objects"),
        (b'{"messages":[' + b'"a",' * MAX_TEXTS + b'"a"]}', "texts and keys"),
        (b'{"messages":[' + b"1," * MAX_VALUES + b"1]}", "elements"),
    ],
)
def test_body_that_takes_long_to_parse_is_refused_before(body: bytes, named: str) -> None:
    with pytest.raises(Problem) as refused:
        parse(ChatRequest, body)

    assert (refused.value.status, refused.value.code) == (400, "body_too_large")
    assert named in refused.value.message


def test_long_text_full_of_punctuation_is_one_text() -> None:
    said = json.dumps({"messages": [{"role": "user", "content": '{"a": [1, 2]},\\' * 50_000}]})

    assert len(parse(ChatRequest, said.encode()).messages) == 1
