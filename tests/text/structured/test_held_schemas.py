"""Whatever a schema lets a grammar write satisfies the schema, or the schema is refused by the place at fault."""

import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from baton.text.structured.library import GrammarFailed, Vocabulary, compile_form, next_tokens, take_tokens
from baton.text.structured.output import FormRefused, StructuredKind, StructuredOutput, enforceable_form, json_schema
from baton.text.structured.schema import SchemaRefused, enforceable_schema
from tests.router.tokenizers_for_tests import END, byte_level

BYTES = byte_level()
VOCABULARY = Vocabulary(BYTES.to_str(), BYTES.get_vocab_size(), [BYTES.token_to_id(END) or 0])
LETTERS = [BYTES.encode(letter).ids[0] for letter in 'ab"\\u0061{}[]:,.-0123456789truefalsn']
MOST_TOKENS = 300
Schema = dict[str, Any]


def walked(schema: Schema, seed: int) -> str | None:
    """An answer that the grammar of the schema lets through; None where the walk comes to no end."""
    drawn = random.Random(seed)
    matcher, text = compile_form(enforceable_form(json_schema(schema)), VOCABULARY), list[int]()
    while len(text) < MOST_TOKENS:
        if matcher.is_accepting() and drawn.random() < 0.5:
            return BYTES.decode(text)
        bits = next_tokens(matcher)
        allowed = [token for token in LETTERS if bits[token >> 3] >> (token & 7) & 1]
        if not allowed:  # a letter that the small vocabulary lacks
            allowed = [t for t in range(VOCABULARY.size) if bits[t >> 3] >> (t & 7) & 1 and t not in VOCABULARY.special]
        if not allowed:
            return BYTES.decode(text) if matcher.is_accepting() else None
        if len(text) > MOST_TOKENS // 3:  # towards the end
            closing = [token for token in allowed if BYTES.decode([token]) in '"}]']
            allowed = closing or allowed
        text.append(drawn.choice(allowed))
        take_tokens(matcher, text[-1:])
    return BYTES.decode(text) if matcher.is_accepting() else None


COUNT = st.integers(0, 3)
NAMES = st.sampled_from(["a", "b", "ab", "t"])
VALUES = st.sampled_from([None, True, False, 0, 1, -2.5, "a", "b", "", ["a"], {"a": 1}])


def some(**keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[Schema]:
    """Any of the keywords."""
    return st.fixed_dictionaries({}, optional=keywords)


def typed(kind: str, **keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[Schema]:
    return some(**keywords).map(lambda made: {"type": kind, **made})


LEAVES: st.SearchStrategy[Any] = st.one_of(
    st.booleans(),
    typed("string", minLength=COUNT, maxLength=COUNT, pattern=st.sampled_from(["^a*b?$", "[0-9]", "^(a|t)+$"])),
    typed("string", format=st.sampled_from(["date", "uuid", "ipv4", "password", "nothing"])),
    typed("integer", minimum=st.integers(-20, 20), exclusiveMaximum=st.integers(-5, 200), multipleOf=st.integers(1, 7)),
    typed(
        "number", exclusiveMinimum=st.integers(-9, 9), maximum=st.floats(-2, 90).map(lambda number: round(number, 2))
    ),
    st.builds(lambda values: {"enum": values}, st.lists(VALUES, min_size=1, max_size=4)),
    VALUES.map(lambda value: {"const": value}),
    st.sampled_from([{"$ref": "#/$defs/x"}, {"type": "boolean"}, {"type": "null"}, {"type": ["string", "integer"]}]),
)


def branches(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    members = st.lists(inner, min_size=1, max_size=3)
    closed = st.one_of(st.just(False), st.just(False), inner)
    properties = st.dictionaries(NAMES, inner, max_size=3)
    return st.one_of(
        typed("array", items=inner, minItems=COUNT, maxItems=COUNT, uniqueItems=st.booleans(), prefixItems=members),
        typed(
            "object",
            properties=properties,
            required=st.lists(NAMES, max_size=2, unique=True),
            additionalProperties=closed,
            minProperties=COUNT,
            maxProperties=COUNT,
        ),
        typed("object", patternProperties=st.dictionaries(st.sampled_from(["^a", "b$"]), inner, max_size=2),
              additionalProperties=closed, properties=properties, minProperties=st.integers(0, 1)),
        typed("object", propertyNames=st.sampled_from([{"enum": ["a", "b"]}, {"pattern": "^[ab]+$"}, {"maxLength": 2}]),
              additionalProperties=inner, minProperties=COUNT, maxProperties=COUNT),
        members.map(lambda made: {"anyOf": made}),
        members.map(lambda made: {"oneOf": made}),
        st.tuples(inner, inner).map(lambda pair: {"allOf": list(pair)}),
        st.tuples(inner, some(minProperties=COUNT, maxProperties=COUNT, required=st.just(["a"]), anyOf=members)).map(
            lambda pair: {**(pair[0] if isinstance(pair[0], dict) else {}), **pair[1]}
        ),
    )  # fmt: skip


SCHEMAS = st.builds(
    lambda schema, shared: {**(schema if isinstance(schema, dict) else {"anyOf": [schema]}), "$defs": {"x": shared}},
    st.recursive(LEAVES, branches, max_leaves=6),
    LEAVES.filter(lambda leaf: leaf != {"$ref": "#/$defs/x"}),
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(SCHEMAS, st.integers(0, 1 << 16))
def test_answers_satisfy_every_accepted_schema(schema: Schema, seed: int) -> None:
    try:
        answer = walked(schema, seed)
    except (FormRefused, GrammarFailed):
        assume(False)
    assume(answer is not None)
    jsonschema.Draft202012Validator(schema).validate(json.loads(answer or ""))


def test_form_that_grows_too_large_fails_without_words_of_the_library() -> None:
    matcher = compile_form(StructuredOutput(StructuredKind.REGEX, "((a{1,999}){1,999}){1,999}"), VOCABULARY)
    with pytest.raises(GrammarFailed, match=r"^it is too large or too ambiguous$"):
        for _ in range(MOST_TOKENS):
            next_tokens(matcher)
            take_tokens(matcher, BYTES.encode("a").ids)


def letters_through(schema: Schema, text: str) -> bool:
    """Whether the grammar of the schema lets the text through as a whole answer."""
    matcher, token_ids = compile_form(enforceable_form(json_schema(schema)), VOCABULARY), BYTES.encode(text).ids
    if matcher.validate_tokens(token_ids) < len(token_ids):
        return False
    take_tokens(matcher, token_ids)
    return matcher.is_accepting()


def an_object(**keywords: Any) -> Schema:
    return {"type": "object", **keywords}


OPEN, SHUT = {"additionalProperties": {"type": "integer"}}, {"additionalProperties": False}
THREE = {"a": True, "b": True, "c": True}
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
COLOUR = {"type": "string", "enum": ["red", "blue"]}
TAGS = {"type": "array", "items": COLOUR, "uniqueItems": True}


@pytest.mark.parametrize(
    ("schema", "good", "wrong"),
    [
        (an_object(properties={"a": True}, minProperties=1, **OPEN, required=["a"]), '{"a":1}', "{}"),
        (an_object(minProperties=1, **OPEN), '{"x":1}', "{}"),
        (an_object(maxProperties=1, **OPEN), '{"x":1}', '{"x":1,"y":1}'),
        (an_object(properties=THREE, minProperties=2, **SHUT), '{"a":1,"c":1}', '{"b":1}'),
        (an_object(properties=THREE, maxProperties=2, **SHUT), '{"b":1}', '{"a":1,"b":1,"c":1}'),
        (an_object(properties={"a": {"type": "integer"}}), '{"a":1,"x":2}', r'{"a":1,"\u0061":"x"}'),
        (TAGS, '["blue","red"]', '["red","red"]'),
        ({**TAGS, "minItems": 2}, '["red","blue"]', '["red"]'),
        ({**TAGS, "items": {"type": "string"}, "maxItems": 1}, '["x"]', '["x","x"]'),
        (an_object(propertyNames=COLOUR, **OPEN), '{"red":1}', '{"green":1}'),
        (an_object(propertyNames={"pattern": "^[a-c]+$"}, **OPEN), '{"abc":1}', '{"d":1}'),
        (an_object(propertyNames={"maxLength": 2}, **OPEN), '{"ab":1}', '{"abc":1}'),
        ({"type": "string", "format": "password", "writeOnly": True}, '"x"', "1"),
        ({"type": "string", "format": "date"}, '"2026-11-28"', '"tomorrow"'),
        ({"anyOf": [{"type": "number"}, {"type": "string", "pattern": "^(?!x)y"}]}, "1.5", '"y"'),
        ({"$schema": DRAFT_7, "items": [{"const": 1}, {"const": 2}], "additionalItems": False}, "[1,2]", "[1,2,3]"),
        ({"oneOf": [{"$ref": "#/$defs/A"}, {"type": "null"}], "$defs": {"A": an_object(**SHUT)}}, "null", "1"),
        ({"type": "array", "items": {"$ref": "#"}}, "[[],[[]]]", "[1]"),
    ],
)  # fmt: skip
def test_grammar_of_a_schema_allows_its_values(schema: Schema, good: str, wrong: str) -> None:
    jsonschema.validate(json.loads(good), schema)

    assert (letters_through(schema, good), letters_through(schema, wrong)) == (True, False)


@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        (an_object(properties={"a~/b": {"not": {}}}), "#/properties/a~0~1b/not"),
        (an_object(minProperties=2, **OPEN), "#/minProperties"),
        (an_object(required=["a", "b"], maxProperties=1), "#/maxProperties"),
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "#/uniqueItems"),
        (an_object(propertyNames={"not": {"const": "a"}}), "#/propertyNames"),
        ({"type": "string", "pattern": "(?=a)b"}, "#/pattern"),
        ({"anyOf": [{"if": {}}, {"$ref": "#/$defs/x"}]}, "#/anyOf/0/if"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "#/oneOf"),
        ({"$ref": "https://example.org/x"}, "#/$ref"),
        ({"items": {"type": "text"}}, "#/items/type"),
        ({"required": "a"}, "#/required"),
        ({"enum": []}, "#/enum"),
        ({"maxLength": -1}, "#/maxLength"),
    ],
)
def test_schema_that_cannot_be_held_is_refused_by_its_json_pointer(schema: Schema, pointer: str) -> None:
    with pytest.raises(SchemaRefused) as refused:
        enforceable_schema(schema)

    assert str(refused.value).startswith(f"{pointer}: ")


def test_annotations_do_not_count_towards_the_size_of_a_form() -> None:
    long = {"description": "x" * 60_000, "title": "y" * 60_000, "examples": ["z" * 60_000], "default": "w" * 60_000}

    schema = {**long, "type": "object", "properties": {"title": {**long, "type": "string"}}}
    form = enforceable_form(json_schema(schema))

    assert json.loads(form.text) == {"type": "object", "properties": {"title": {"type": "string"}}}
