"""The whole router over gRPC with scripted workers: what it refuses, and how it says so."""

from typing import Any, TypeVar

import grpc
import pytest
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from baton.protos import baton_pb2
from tests.router.conftest import Stack, text_of
from tests.router.fake_worker import FakePair

Detail = TypeVar("Detail")
GENERATE = "/baton.v1.BatonService/Generate"
NAN = float("nan")
END = 256  # the end-of-sequence token of the model folder
ODD = "a\n\x1b[31mb"
INVALID = grpc.StatusCode.INVALID_ARGUMENT


def request_of(**fields: Any) -> baton_pb2.GenerateRequest:
    return baton_pb2.GenerateRequest(**({"text": "hello"} | fields))


def sampling(**fields: Any) -> baton_pb2.GenerateRequest:
    return request_of(sampling=baton_pb2.SamplingParams(**fields))


def ids(*token_ids: int) -> baton_pb2.TokenIds:
    return baton_pb2.TokenIds(ids=token_ids)


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while await call.read() is not grpc.aio.EOF:
            pass
    return caught.value


def detail(error: grpc.aio.AioRpcError, kind: type[Detail]) -> Detail:
    status: Any = rpc_status.from_call(error)  # type: ignore[arg-type]
    for packed in status.details:
        found = kind()
        if packed.Unpack(found):
            return found
    raise AssertionError(f"no {kind.__name__} in {status}")


def fields_of(error: grpc.aio.AioRpcError) -> list[str]:
    return [violation.field for violation in detail(error, error_details_pb2.BadRequest).field_violations]


def speculative(**fields: Any) -> baton_pb2.GenerateRequest:
    return sampling(speculative=baton_pb2.Speculative(**fields))


BAD = [
    (baton_pb2.GenerateRequest(), "prompt"),
    (request_of(text=""), "text"),
    (baton_pb2.GenerateRequest(token_ids=ids()), "token_ids"),
    (baton_pb2.GenerateRequest(token_ids=ids(1, 257)), "token_ids.ids[1]"),
    (request_of(text="x" * 200), "text"),
    (baton_pb2.GenerateRequest(token_ids=ids(*[1] * 128)), "token_ids"),
    (request_of(request_id="x" * 129), "request_id"),
    (request_of(cache_salt="x" * 257), "cache_salt"),
    (request_of(priority=101), "priority"),
    (request_of(priority=-1000), "priority"),
    (request_of(ttft_slo_ms=0.5), "ttft_slo_ms"),
    (request_of(tbt_slo_ms=float("nan")), "tbt_slo_ms"),
    (sampling(temperature=float("nan")), "sampling.temperature"),
    (sampling(temperature=100.5), "sampling.temperature"),
    (sampling(top_p=0.0), "sampling.top_p"),
    (sampling(min_p=1.5), "sampling.min_p"),
    (sampling(max_tokens=0), "sampling.max_tokens"),
    (sampling(max_tokens=124), "sampling.max_tokens"),
    (sampling(n=0), "sampling.n"),
    (sampling(n=17), "sampling.n"),
    (sampling(stop=["x"] * 1_000_000), "sampling.stop"),
    (sampling(stop=["ok", ""]), "sampling.stop[1]"),
    (sampling(stop=["é" * 129]), "sampling.stop[0]"),
    (sampling(stop_token_ids=[1] * 65), "sampling.stop_token_ids"),
    (sampling(stop_token_ids=[1, 300]), "sampling.stop_token_ids[1]"),
    (request_of(request_id=ODD), "request_id"),
    (request_of(session_id=ODD), "session_id"),
    (request_of(model=ODD), "model"),
    (request_of(model="m" * 129), "model"),
    (speculative(num_speculative_tokens=3), "sampling.speculative.method"),
    (speculative(method="eagle"), "sampling.speculative.method"),
    (speculative(method="ngram", num_speculative_tokens=0), "sampling.speculative.num_speculative_tokens"),
    (speculative(method="off", num_speculative_tokens=65), "sampling.speculative.num_speculative_tokens"),
    (sampling(typical_p=0.0), "sampling.typical_p"),
    (sampling(typical_p=1.5), "sampling.typical_p"),
    (sampling(repetition_penalty=0.0), "sampling.repetition_penalty"),
    (sampling(repetition_penalty=10.5), "sampling.repetition_penalty"),
    (sampling(repetition_penalty=NAN), "sampling.repetition_penalty"),
    (sampling(presence_penalty=2.5), "sampling.presence_penalty"),
    (sampling(frequency_penalty=-2.5), "sampling.frequency_penalty"),
    (sampling(logit_bias={257: 1.0}), "sampling.logit_bias[257]"),
    (sampling(logit_bias={5: NAN}), "sampling.logit_bias[5]"),
    (sampling(logit_bias={5: -100.5}), "sampling.logit_bias[5]"),
    (sampling(logit_bias=dict.fromkeys(range(301), 0.0)), "sampling.logit_bias"),
    (sampling(max_tokens=3, min_tokens=4), "sampling.min_tokens"),
    (sampling(min_tokens=124), "sampling.min_tokens"),
    (sampling(allowed_token_ids=[1, 257]), "sampling.allowed_token_ids[1]"),
    (sampling(allowed_token_ids=[1] * 1025), "sampling.allowed_token_ids"),
    (sampling(allowed_token_ids=[END], min_tokens=1), "sampling.allowed_token_ids"),
    (sampling(allowed_token_ids=[7], bad_word_token_ids=[ids(7)]), "sampling.allowed_token_ids"),
    (sampling(bad_words=["ok", ""]), "sampling.bad_words[1]"),
    (sampling(bad_words=["x" * 257]), "sampling.bad_words[0]"),
    (sampling(bad_words=["x"] * 65), "sampling.bad_words"),
    (sampling(bad_word_token_ids=[ids()]), "sampling.bad_word_token_ids[0].ids"),
    (sampling(bad_word_token_ids=[ids(1), ids(2, 257)]), "sampling.bad_word_token_ids[1].ids[1]"),
    (sampling(bad_word_token_ids=[ids(*[1] * 257)]), "sampling.bad_word_token_ids[0].ids"),
    (sampling(bad_word_token_ids=[ids(1)] * 65), "sampling.bad_word_token_ids"),
    (sampling(logprobs=21), "sampling.logprobs"),
    (sampling(prompt_logprobs=21), "sampling.prompt_logprobs"),
    (sampling(best_of=17), "sampling.best_of"),
    (sampling(n=3, best_of=2), "sampling.best_of"),
    (sampling(beam_width=17), "sampling.beam_width"),
    (sampling(n=3, beam_width=2), "sampling.beam_width"),
    (sampling(length_penalty=1.0), "sampling.length_penalty"),
    (sampling(early_stopping=baton_pb2.EARLY_STOPPING_FULL), "sampling.early_stopping"),
    (sampling(beam_width=2, early_stopping=9), "sampling.early_stopping"),
    (sampling(beam_width=2, length_penalty=11.0), "sampling.length_penalty"),
    (sampling(beam_width=2, temperature=0.5), "sampling.temperature"),
    (sampling(beam_width=2, best_of=2), "sampling.best_of"),
    (sampling(beam_width=2, stop=["x"]), "sampling.stop"),
    (sampling(beam_width=2, logprobs=1), "sampling.logprobs"),
    (sampling(beam_width=2, repetition_penalty=1.5), "sampling.repetition_penalty"),
    (sampling(beam_width=2, logit_bias={5: 1.0}), "sampling.logit_bias"),
    (sampling(beam_width=2, min_tokens=1), "sampling.min_tokens"),
    (sampling(beam_width=2, allowed_token_ids=[5]), "sampling.allowed_token_ids"),
    (sampling(beam_width=2, bad_words=["x"]), "sampling.bad_words"),
    (sampling(json_schema="{"), "sampling.json_schema"),
    (sampling(json_schema='{"type": "nothing"}'), "sampling.json_schema"),
    (sampling(regex="(a"), "sampling.regex"),
    (sampling(regex="x" * 70_000), "sampling.regex"),
    (sampling(grammar="x"), "sampling.grammar"),
    (sampling(choice=baton_pb2.Texts()), "sampling.choice"),
    (sampling(choice=baton_pb2.Texts(texts=["a"] * 1001)), "sampling.choice"),
    (sampling(regex="a", ignore_eos=True), "sampling.ignore_eos"),
    (sampling(regex="a", beam_width=2), "sampling.beam_width"),
    (sampling(regex="a", allowed_token_ids=[5]), "sampling.allowed_token_ids"),
    (sampling(regex="(((a{1000}){1000}){1000}){1000}"), "sampling.regex"),
]


async def test_bad_input_names_its_field_and_the_router_serves_on(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    await stack.ready()
    for request, field in BAD:
        error = await refusal(stack.stub.Generate(request, timeout=20))
        assert (error.code(), fields_of(error)) == (INVALID, [field]), str(request)[:200]
        assert str(error.details()).startswith(f"{field}: "), error.details()
    assert not any("\x1b" in each.getMessage() for each in caplog.records)
    assert not [command for command in stack.prefill.commands if command.HasField("prefill")]
    assert text_of(await stack.generate(max_tokens=3)) == "hel"
    assert not (await stack.status()).active_requests


async def test_a_prompt_that_is_too_long_says_by_how_much(stack: Stack) -> None:
    error = await refusal(stack.stub.Generate(request_of(text="x" * 128), timeout=10))
    info = detail(error, error_details_pb2.ErrorInfo)
    assert (info.reason, dict(info.metadata)) == ("PROMPT_TOO_LONG", {"limit": "127", "got": "128"})


async def test_an_unknown_model_is_not_found(stack: Stack) -> None:
    error = await refusal(stack.stub.Generate(request_of(model="other"), timeout=10))
    assert error.code() is grpc.StatusCode.NOT_FOUND
    assert detail(error, error_details_pb2.ResourceInfo).resource_name == "other"


async def test_messages_that_the_template_refuses(stack: Stack) -> None:
    request = baton_pb2.ChatRequest(messages=[baton_pb2.ChatMessage(role="bad", content="hi")])
    error = await refusal(stack.stub.Chat(request, timeout=10))
    assert (error.code(), fields_of(error)) == (INVALID, ["messages"])
    assert "no such role" in (error.details() or "")


NO_MESSAGES = [
    ("request_id", b"\x0a\x02\xff\xfe"),
    ("text", b"\x1a\x03a\xffb"),
    ("sampling.stop[1]", b"\x1a\x01a\x2a\x07\x3a\x01o\x3a\x02\xc3\x28"),
    ("request", b"\x0a\xff"),
    ("request", b"\x0f\x01"),
]


async def test_bytes_that_are_no_message_are_an_invalid_argument(stack: Stack) -> None:
    generate: Any = stack.channel.unary_stream(GENERATE)
    for field, message in NO_MESSAGES:
        error = await refusal(generate(message, timeout=10))
        assert (error.code(), fields_of(error)) == (INVALID, [field])
    assert text_of(await stack.generate(max_tokens=3)) == "hel"
    tokenize: Any = stack.channel.unary_unary("/baton.v1.BatonService/Tokenize")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await tokenize(b"\x12\x01\xff", timeout=10)
    assert (caught.value.code(), fields_of(caught.value)) == (INVALID, ["text"])


@pytest.mark.parametrize("settings", [{"max_waiting": 1, "max_wait_s": 0.2}], indirect=True)
async def test_without_room_a_request_waits_and_then_is_told_when_to_come_back(stack: Stack) -> None:
    await stack.ready()
    stack.decode.report.limit_slots = 0
    await stack.until(lambda status: not any(worker.report.limit_slots for worker in status.workers))
    error = await refusal(stack.stub.Generate(request_of(), timeout=10))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert detail(error, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() > 0
    assert not [c for c in stack.prefill.commands if c.WhichOneof("command") == "prefill"]
    stack.decode.report.limit_slots = 64
    await stack.until(lambda status: any(worker.report.limit_slots for worker in status.workers))
    assert text_of(await stack.generate(max_tokens=3)) == "hel"


@pytest.fixture
def small_decode_worker(pair: FakePair) -> None:
    pair.decode.info.total_slots = 8
    pair.decode.info.total_blocks = 20  # of 4 tokens


@pytest.mark.usefixtures("small_decode_worker")
async def test_request_that_can_never_fit_is_refused_at_once(stack: Stack) -> None:
    for asked, field in (({"n": 16, "max_tokens": 2}, "sampling.n"), ({"max_tokens": 100}, "sampling.max_tokens")):
        error = await refusal(stack.stub.Generate(sampling(**asked), timeout=10))
        assert (error.code(), fields_of(error)) == (INVALID, [field])


@pytest.mark.parametrize("settings", [{"ready_wait_s": 0.1, "workers": "prefill@127.0.0.1:1"}], indirect=True)
async def test_without_workers_a_request_is_told_so(stack: Stack) -> None:
    error = await refusal(stack.stub.Generate(request_of(), timeout=10))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert detail(error, error_details_pb2.ErrorInfo).reason == "NOT_READY"
    assert detail(error, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() > 0
    assert not (await stack.status()).ready
