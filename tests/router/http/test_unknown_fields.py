"""No field of any route is dropped: from the routes of the application, and from their models, all of them."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from baton.router.http import messages
from baton.router.http.anthropic.bodies import ANTHROPIC_MESSAGES
from baton.router.http.edge.endpoint import Endpoint, QueryEndpoint
from baton.router.http.edge.problem import Problem
from baton.router.http.ollama.bodies import OLLAMA_MESSAGES
from baton.router.http.parse import parse
from baton.router.http.responses.bodies import CompactRequest, ResponseRequest
from baton.router.http.vectors.bodies import VECTOR_MESSAGES
from tests.fixtures.bodies import Place, examples, fields_of, models_of, objects, unserved
from tests.fixtures.routes import ROUTES

ENDPOINTS = {route.path: route.endpoint for route in ROUTES if isinstance(route.endpoint, Endpoint)}
MESSAGES: dict[str, type[BaseModel]] = {path: endpoint.message_type for path, endpoint in ENDPOINTS.items()}
PLACES = [
    (path, place)
    for path, message in MESSAGES.items()
    for body in examples(message)
    for place in objects(body, body)
]  # fmt: skip
MODELS = sorted(
    {model for message in MESSAGES.values() for model in models_of(message)}, key=lambda model: model.__name__
)
NAMES = {name for model in MODELS for name in fields_of(model)}
HARMLESS = "accepted, does nothing: "


def refusal(message: type[BaseModel], body: Any) -> Problem | None:
    try:
        parse(message, json.dumps(body).encode())
    except Problem as problem:
        return problem
    return None


def test_every_route_takes_a_message_or_nothing() -> None:
    assert len(ENDPOINTS) >= 6
    assert all(isinstance(route.endpoint, Endpoint | QueryEndpoint) for route in ROUTES)


def test_every_model_of_every_route_forbids_undeclared_fields() -> None:
    for model in MODELS:
        assert model.model_config.get("extra") == "forbid", model


def test_large_bodies_of_every_route_are_parsed_by_the_same_models() -> None:
    bodies = {
        *messages.MESSAGES,
        *ANTHROPIC_MESSAGES,
        *OLLAMA_MESSAGES,
        *VECTOR_MESSAGES,
        ResponseRequest,
        CompactRequest,
    }
    assert bodies == set(MESSAGES.values())


def test_examples_are_good_bodies_and_reach_every_model() -> None:
    for path, place in PLACES:
        assert refusal(MESSAGES[path], place.body) is None, place.body
    for path, message in MESSAGES.items():
        seen = {frozenset(place.value) for other, place in PLACES if other == path}
        for model in models_of(message):
            required = {name for name, field in fields_of(model).items() if field.is_required()}
            assert any(required <= keys <= fields_of(model).keys() for keys in seen), (path, model)


@pytest.mark.parametrize("path", MESSAGES)
def test_unknown_field_in_any_object_is_refused_by_its_path(path: str) -> None:
    for place in (place for other, place in PLACES if other == path):
        check_refused(path, place, "no_such_field", None)


@settings(max_examples=200, deadline=None)
@given(
    where=st.sampled_from(PLACES),
    name=st.text(st.characters(exclude_categories=("Cs",)), max_size=20).filter(lambda name: name not in NAMES),
    value=st.sampled_from([None, 0, "a", {}, [[]]]),
)
def test_field_of_any_name_is_refused_by_its_path(where: tuple[str, Place], name: str, value: Any) -> None:
    check_refused(*where, name, value)


def check_refused(path: str, place: Place, name: str, value: Any) -> None:
    kept = dict(place.value)
    place.value[name] = value  # the body has this object in it
    problem = refusal(MESSAGES[path], place.body)
    place.value.clear()
    place.value.update(kept)

    expected = f"{place.path}.{name}" if place.path else name
    assert problem is not None and problem.param == expected, (path, place)
    assert problem.status == 400 and expected in problem.message


@pytest.mark.parametrize("model", MODELS)
def test_only_values_that_ask_for_something_unserved_are_refused(model: type[BaseModel]) -> None:
    least = next(examples(model))
    for name, told in ((name, unserved(field)) for name, field in fields_of(model).items()):
        if told is not None:
            problem = refusal(model, least | {name: {"x": 1}})
            assert problem is not None and problem.param == name, name
            assert "is not served" in problem.message and told.reason in problem.message
            assert all(refusal(model, least | {name: value}) is None for value in (None, *told.neutral)), name


def test_every_harmless_field_has_a_reason_and_may_be_absent() -> None:
    listed = [
        each for model in MODELS for each in fields_of(model).items() if (each[1].description or "")[:8] == "accepted"
    ]
    assert len({name for name, _ in listed}) > 15
    for name, field in listed:
        assert (field.description or "").removeprefix(HARMLESS) not in ("", field.description), name
        assert field.default is None and unserved(field) is None, name


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("temprature", "temperature"),
        ("maxtokens", "max_tokens"),
        ("max_token", "max_tokens"),
        ("topk", "top_k"),
        ("top-p", "top_p"),
        ("guided_jsonn", "guided_json"),
    ],
)
def test_typo_is_answered_with_the_nearest_name(typed: str, meant: str) -> None:
    problem = refusal(MESSAGES["/v1/completions"], {"prompt": "a", typed: 1})

    assert problem is not None and problem.message == f"{typed}: unknown field; did you mean {meant}?"


def test_long_name_is_cut_in_the_error() -> None:
    problem = refusal(MESSAGES["/v1/completions"], {"prompt": "a", "x" * 50_000: 1})

    assert problem is not None and problem.param == "x" * 64 and len(problem.body) < 500


def test_misspelled_required_field_is_named_rather_than_missing() -> None:
    problem = refusal(MESSAGES["/v1/chat/completions"], {"mesages": []})

    assert problem is not None and problem.message == "mesages: unknown field; did you mean messages?"


def test_part_of_another_type_is_refused_by_its_type() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "data:"}}]

    problem = refusal(MESSAGES["/v1/chat/completions"], {"messages": [{"role": "user", "content": parts}]})

    assert problem is not None and problem.param == "messages[0].content[0].type"


def test_log_likelihoods_are_asked_for_as_lm_eval_does() -> None:
    body = {"model": "m", "prompt": [[5, 6]], "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1, "echo": True}

    assert refusal(MESSAGES["/v1/completions"], body) is None
