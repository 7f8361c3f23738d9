"""Invalid requests are refused with the name of the field, and the stack keeps serving."""

import grpc
import pytest

from baton.client import BatonClient, InvalidRequest, ModelNotFound
from baton.protos import baton_pb2, baton_pb2_grpc
from tests.e2e.stack import Stack

VOCABULARY = 512
CONTEXT = 2048


def sampling(**fields: object) -> baton_pb2.SamplingParams:
    return baton_pb2.SamplingParams(**fields)  # type: ignore[arg-type]


def prompt(*ids: int) -> baton_pb2.TokenIds:
    return baton_pb2.TokenIds(ids=ids)


BAD = {
    "no prompt": ({}, "prompt"),
    "empty text": ({"text": ""}, "text"),
    "empty token ids": ({"token_ids": prompt()}, "token_ids"),
    "token id out of range": ({"token_ids": prompt(5, VOCABULARY)}, "token_ids"),
    "too long": ({"token_ids": prompt(*[7] * CONTEXT)}, "token_ids"),
    "temperature NaN": (
        {"token_ids": prompt(5), "sampling": sampling(temperature=float("nan"))},
        "sampling.temperature",
    ),
    "temperature infinite": (
        {"token_ids": prompt(5), "sampling": sampling(temperature=float("inf"))},
        "sampling.temperature",
    ),
    "top_p 0": ({"token_ids": prompt(5), "sampling": sampling(top_p=0.0)}, "sampling.top_p"),
    "min_p 2": ({"token_ids": prompt(5), "sampling": sampling(min_p=2.0)}, "sampling.min_p"),
    "a million stop texts": ({"token_ids": prompt(5), "sampling": sampling(stop=["x"] * 1_000_000)}, "sampling.stop"),
    "empty stop text": ({"token_ids": prompt(5), "sampling": sampling(stop=[""])}, "sampling.stop"),
    "n 0": ({"token_ids": prompt(5), "sampling": sampling(n=0)}, "sampling.n"),
    "n 10000": ({"token_ids": prompt(5), "sampling": sampling(n=10_000)}, "sampling.n"),
    "max_tokens 0": ({"token_ids": prompt(5), "sampling": sampling(max_tokens=0)}, "sampling.max_tokens"),
    "max_tokens past the context": (
        {"token_ids": prompt(5), "sampling": sampling(max_tokens=CONTEXT)},
        "sampling.max_tokens",
    ),
    "stop token out of range": (
        {"token_ids": prompt(5), "sampling": sampling(stop_token_ids=[VOCABULARY])},
        "sampling.stop_token_ids",
    ),
    "request id too long": ({"token_ids": prompt(5), "request_id": "x" * 1000}, "request_id"),
    "salt too long": ({"token_ids": prompt(5), "cache_salt": "x" * 1000}, "cache_salt"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_request_names_its_field(stack: Stack, name: str) -> None:
    fields, field = BAD[name]
    with grpc.insecure_channel(stack.target) as channel:
        stub = baton_pb2_grpc.BatonServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.Generate(baton_pb2.GenerateRequest(**fields), timeout=20))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details().startswith(field)
    assert still_serves(stack)


def test_unknown_model_is_not_found(stack: Stack) -> None:
    with BatonClient(stack.target) as baton, pytest.raises(ModelNotFound):
        list(baton.generate([5], model="gpt-17"))


def test_invalid_utf8_is_an_invalid_argument(stack: Stack) -> None:
    """Protobuf libraries never send invalid UTF-8, so the message is written by hand: field 3 is the prompt text."""
    body = bytes([3 << 3 | 2, 2, 0x68, 0x80])
    with grpc.insecure_channel(stack.target) as channel:
        call = channel.unary_stream("/baton.v1.BatonService/Generate")
        with pytest.raises(grpc.RpcError) as refused:
            list(call(body, timeout=20))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "text" in refused.value.details()
    assert still_serves(stack)


def test_client_library_says_which_field_was_wrong(stack: Stack) -> None:
    with BatonClient(stack.target) as baton, pytest.raises(InvalidRequest) as refused:
        list(baton.generate([5], temperature=float("nan")))
    assert refused.value.field == "sampling.temperature"


def still_serves(stack: Stack) -> bool:
    with BatonClient(stack.target, timeout_s=20) as baton:
        return len(baton.complete([5, 6, 7], max_tokens=3, ignore_eos=True).choices[0].token_ids) == 3
