"""Large gRPC messages: looked at where nobody waits for a token, and refused there by the field that is too much."""

from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from baton.process.errors import BatonError, InvalidArgument, ResourceExhausted, Unavailable
from baton.process.helper import Buffer, HelperBusy, HelperFailed
from baton.process.serving.grpc_options import PUBLIC_MESSAGE_BYTES
from baton.protos import baton_pb2
from baton.router.model.validation import MAX_TEXT_BYTES
from baton.router.public.parsing import MAX_NUMBERS, MAX_PARTS, SMALL_BYTES, Prevalidation, Unparsed, verdict
from baton.router.public.service import small_parser
from tests.router.conftest import Stack

UNKNOWN = bytes([15 << 3, 1])  # field 15, a varint
WAIT_S = 60.0  # for a process that starts
GENERATE = "/baton.v1.BatonService/Generate"


class InThisProcess:
    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    async def ask(self, parts: Sequence[Buffer]) -> bytearray:
        if self._error is not None:
            raise self._error
        return bytearray(b"".join(verdict(memoryview(b"".join(parts)))))

    def close(self) -> None:
        pass


async def prevalidated(message: Message | bytes, kind: type[Message] = baton_pb2.GenerateRequest) -> Message:
    data = message if isinstance(message, bytes) else message.SerializeToString()
    return await Prevalidation(InThisProcess())(Unparsed(kind, data))


def request(**sampling: Any) -> baton_pb2.GenerateRequest:
    return baton_pb2.GenerateRequest(text="a", sampling=baton_pb2.SamplingParams(**sampling))


CHAT = baton_pb2.ChatRequest(messages=[baton_pb2.ChatMessage()] * (MAX_PARTS + 1))
TOO_MUCH: dict[str, tuple[Message, str]] = {
    "texts": (request(stop=["x"] * (MAX_PARTS + 1)), "sampling.stop"),
    "messages": (CHAT, "messages"),
    "pairs": (request(logit_bias=dict.fromkeys(range(MAX_PARTS + 1), 1.0)), "sampling.logit_bias"),
    "numbers": (baton_pb2.GenerateRequest(token_ids=baton_pb2.TokenIds(ids=[7] * (MAX_NUMBERS + 1))), "token_ids.ids"),
    "text": (baton_pb2.GenerateRequest(text="\u4e2d" * (MAX_TEXT_BYTES // 3 + 1)), "text"),
    "in lists of lists": (
        request(bad_word_token_ids=[baton_pb2.TokenIds(ids=[7] * (MAX_NUMBERS // 4))] * 5),
        "sampling.bad_word_token_ids.ids",
    ),
}


@pytest.mark.parametrize("name", TOO_MUCH)
async def test_too_much_is_refused_by_its_field(name: str) -> None:
    message, field = TOO_MUCH[name]
    with pytest.raises(InvalidArgument) as refused:
        await prevalidated(message, type(message))

    assert refused.value.field == field


async def test_bounded_message_round_trips_without_unknown_fields() -> None:
    message = baton_pb2.GenerateRequest(token_ids=baton_pb2.TokenIds(ids=[*range(100_000)]), cache_salt="a")

    assert await prevalidated(message.SerializeToString() + UNKNOWN * 100_000) == message


async def test_invalid_utf8_is_named_by_the_process() -> None:
    with pytest.raises(InvalidArgument) as refused:
        await prevalidated(bytes([3 << 3 | 2, 2, 0x68, 0x80]))

    assert refused.value.field == "text"


@pytest.mark.parametrize(("failure", "told"), [(HelperBusy(), ResourceExhausted), (HelperFailed("ended"), Unavailable)])
async def test_without_help_a_large_message_is_refused_for_now(failure: Exception, told: type[BatonError]) -> None:
    with pytest.raises(told):
        await Prevalidation(InThisProcess(failure))(Unparsed(baton_pb2.GenerateRequest, b""))


def test_only_small_complete_messages_are_parsed_in_place() -> None:
    parse = small_parser(baton_pb2.GenerateRequest)

    assert parse(request().SerializeToString()) == request()
    assert isinstance(parse(baton_pb2.GenerateRequest(text="a" * SMALL_BYTES).SerializeToString()), Unparsed)
    assert isinstance(parse(b"\xff"), Unparsed)


async def refusal(stack: Stack, data: bytes) -> grpc.aio.AioRpcError:
    call: Any = stack.channel.unary_stream(GENERATE)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in call(data, timeout=WAIT_S):
            pass
    return refused.value


async def test_router_parses_large_messages_elsewhere_and_rejects_larger_ones(stack: Stack) -> None:
    await stack.ready()
    assert stack.router.prevalidation.prevalidated == 0

    many = await refusal(stack, request(stop=["x"] * 100_000).SerializeToString())
    broken = await refusal(stack, bytes([3 << 3 | 2, 2, 0x68, 0x80]))
    vast = await refusal(stack, baton_pb2.GenerateRequest(text="a" * PUBLIC_MESSAGE_BYTES).SerializeToString())

    assert many.code() is grpc.StatusCode.INVALID_ARGUMENT and (many.details() or "").startswith("sampling.stop")
    assert broken.code() is grpc.StatusCode.INVALID_ARGUMENT and (broken.details() or "").startswith("text")
    assert vast.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert stack.router.prevalidation.prevalidated == 2


async def test_token_id_out_of_range_is_named_in_a_long_prompt_too(stack: Stack) -> None:
    stack.prefill.info.model.max_model_len = stack.decode.info.model.max_model_len = 1 << 15
    await stack.ready()
    token_ids = [5] * 10_000 + [1 << 20]

    refused = await refusal(
        stack, baton_pb2.GenerateRequest(token_ids=baton_pb2.TokenIds(ids=token_ids)).SerializeToString()
    )

    assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (refused.details() or "").startswith("token_ids.ids[10000]")
