from typing import Any, get_type_hints

import pytest

from baton.client.errors import InvalidRequest
from baton.client.requests import CALL_OPTIONS, GenerateOptions, chat_request, choices, generate_request, with_fields
from baton.client.types import Message
from baton.protos import baton_pb2

OTHER_FORMS = {"json_schema", "json_object", "grammar", "choice"}  # of the answer: one at most


OPTIONS: GenerateOptions = {
    "max_tokens": 7,
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 0.5,
    "min_p": 0.25,
    "seed": 2**64 - 1,
    "stop": ["a", "b"],
    "stop_token_ids": [2, 3],
    "ignore_eos": True,
    "n": 2,
    "typical_p": 0.5,
    "repetition_penalty": 1.5,
    "presence_penalty": -2.0,
    "frequency_penalty": 0.25,
    "logit_bias": {5: -100.0},
    "min_tokens": 3,
    "allowed_token_ids": [5, 6],
    "bad_words": ["no", [7, 8]],
    "logprobs": 0,
    "prompt_logprobs": 5,
    "echo": True,
    "best_of": 4,
    "beam_width": 3,
    "length_penalty": -0.5,
    "early_stopping": "never",
    "regex": "a+",
    "speculative": {"method": "ngram", "num_speculative_tokens": 3},
    "model": "tiny",
    "request_id": "r",
    "cache_salt": "s",
    "priority": -5,
    "ttft_slo_ms": 900.5,
    "tbt_slo_ms": 30.0,
    "session_id": "agent-7",
    "keep_for_s": 0.5,
    "done": True,
    "api_key": "k",
    "timeout_s": 1.0,
    "traceparent": "00-0-0-00",
}
"""Every one there is, but the other forms."""

SAMPLING = baton_pb2.SamplingParams(
    max_tokens=7,
    temperature=0.0,
    top_k=0,
    top_p=0.5,
    min_p=0.25,
    seed=2**64 - 1,
    stop=["a", "b"],
    stop_token_ids=[2, 3],
    ignore_eos=True,
    n=2,
    typical_p=0.5,
    repetition_penalty=1.5,
    presence_penalty=-2.0,
    frequency_penalty=0.25,
    logit_bias={5: -100.0},
    min_tokens=3,
    allowed_token_ids=[5, 6],
    bad_words=["no"],
    bad_word_token_ids=[baton_pb2.TokenIds(ids=[7, 8])],
    logprobs=0,
    prompt_logprobs=5,
    best_of=4,
    beam_width=3,
    length_penalty=-0.5,
    early_stopping=baton_pb2.EARLY_STOPPING_NEVER,
    regex="a+",
    speculative=baton_pb2.Speculative(method="ngram", num_speculative_tokens=3),
)
"""What becomes of them."""


def test_text_and_every_option_arrive_in_their_fields() -> None:
    assert set(OPTIONS) | OTHER_FORMS == set(get_type_hints(GenerateOptions))
    expected = baton_pb2.GenerateRequest(
        text="hi",
        model="tiny",
        request_id="r",
        cache_salt="s",
        sampling=SAMPLING,
        echo=True,
        priority=-5,
        ttft_slo_ms=900.5,
        tbt_slo_ms=30.0,
        session_id="agent-7",
        keep_for_s=0.5,
        done=True,
    )
    assert generate_request("hi", OPTIONS) == expected
    by_option = set(SAMPLING.DESCRIPTOR.fields_by_name) - {"bad_word_token_ids"} - OTHER_FORMS  # bad_words too
    assert by_option <= set(OPTIONS), "a sampling parameter has no option"
    assert not set(CALL_OPTIONS) & set(expected.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize(
    ("options", "sampling"),
    [
        ({"json_schema": {"type": "null"}}, baton_pb2.SamplingParams(json_schema='{"type": "null"}')),
        ({"json_schema": "{}"}, baton_pb2.SamplingParams(json_schema="{}")),
        ({"json_object": True}, baton_pb2.SamplingParams(json_object=True)),
        ({"grammar": 'start: "a"'}, baton_pb2.SamplingParams(grammar='start: "a"')),
        ({"choice": ["a", "b"]}, baton_pb2.SamplingParams(choice=baton_pb2.Texts(texts=["a", "b"]))),
        ({"choice": []}, baton_pb2.SamplingParams(choice=baton_pb2.Texts())),
    ],
)
def test_form_of_the_answer(options: Any, sampling: baton_pb2.SamplingParams) -> None:
    assert generate_request("hi", options).sampling == sampling


def test_two_forms_are_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        generate_request("hi", {"regex": "a", "choice": ["a"]})
    assert caught.value.field == "sampling.choice"


@pytest.mark.parametrize("asked", [{"model": "x"}, {"num_speculative_tokens": -1}, {"method": 3}])
def test_invalid_speculation_names_the_field(asked: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        generate_request("hi", {"speculative": asked})
    assert caught.value.field == f"sampling.speculative.{next(iter(asked))}"


def test_absent_options_stay_absent() -> None:
    request = generate_request("hi", {})
    assert not any(request.sampling.HasField(name) for name in ("temperature", "max_tokens", "seed", "n"))
    assert choices(request) == 1


def test_token_ids_are_a_prompt_even_when_empty() -> None:
    assert list(generate_request([1, 2], {}).token_ids.ids) == [1, 2]
    assert generate_request([], {}).WhichOneof("prompt") == "token_ids"


def test_single_stop_string_is_not_split_into_letters() -> None:
    assert list(generate_request("hi", {"stop": "END"}).sampling.stop) == ["END"]


def test_messages_may_be_values_or_mappings() -> None:
    request = chat_request([Message("system", "be brief"), {"role": "user", "content": "hi"}], {"n": 3})
    assert [(message.role, message.content) for message in request.messages] == [("system", "be brief"), ("user", "hi")]
    assert choices(request) == 3


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_tokens": -1}, "sampling.max_tokens"),
        ({"max_tokens": 2**32}, "sampling.max_tokens"),
        ({"seed": -1}, "sampling.seed"),
        ({"n": "two"}, "sampling.n"),
        ({"temperature": "hot"}, "sampling.temperature"),
        ({"stop": [1]}, "sampling.stop"),
        ({"stop": 5}, "sampling.stop"),
        ({"stop_token_ids": [-1]}, "sampling.stop_token_ids"),
        ({"cache_salt": "\ud800"}, "cache_salt"),
        ({"logit_bias": {-1: 1.0}}, "sampling.logit_bias"),
        ({"allowed_token_ids": [2**40]}, "sampling.allowed_token_ids"),
        ({"bad_words": ["ok", [5], [-1]]}, "sampling.bad_word_token_ids[1].ids"),
        ({"logprobs": -1}, "sampling.logprobs"),
    ],
)
def test_value_that_protobuf_cannot_carry_is_refused_by_its_field(options: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        generate_request("hi", options)
    assert refused.value.field == field
    assert field in str(refused.value)


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: generate_request("\ud800", {}), "text"),
        (lambda: generate_request([1, -2], {}), "token_ids"),
        (lambda: chat_request([{"role": "user"}], {}), "messages[0].content"),
        (lambda: chat_request([Message("user", "a"), Message("user", "\ud800")], {}), "messages[1].content"),
        (lambda: with_fields(baton_pb2.TokenizeRequest(), {"text": "\ud800"}), "text"),
        (lambda: with_fields(baton_pb2.DetokenizeRequest(), {"token_ids": [2**32]}), "token_ids"),
    ],
)
def test_bad_prompt_is_refused_with_its_place(build: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        build()
    assert refused.value.field == field


def test_unknown_option_is_a_programming_error() -> None:
    with pytest.raises(TypeError, match="temprature"):
        generate_request("hi", {"temprature": 0.5})  # type: ignore[typeddict-unknown-key]


def test_conversation_is_not_echoed() -> None:
    with pytest.raises(InvalidRequest, match="echo"):
        chat_request([{"role": "user", "content": "hi"}], {"echo": True})


@pytest.mark.parametrize(
    ("given", "wire"),
    [
        (False, baton_pb2.EARLY_STOPPING_UNSPECIFIED),
        (True, baton_pb2.EARLY_STOPPING_FULL),
        ("never", baton_pb2.EARLY_STOPPING_NEVER),
    ],
)
def test_early_stopping_is_that_of_transformers(given: Any, wire: int) -> None:
    assert generate_request("hi", {"early_stopping": given}).sampling.early_stopping == wire


@pytest.mark.parametrize("given", ["always", 2, None])
def test_unknown_early_stopping_is_refused(given: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"sampling\.early_stopping"):
        generate_request("hi", {"early_stopping": given})
