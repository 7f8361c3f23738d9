"""Commands of a router, field by field: within bounds they pass, beyond they are refused by the field's name."""

import math
import secrets
from typing import Any

import pytest

from baton.process.wire_bounds import MAX_EXACT, OutOfBounds
from baton.protos import kept_session_pb2, sampling_pb2, session_pb2
from baton.worker.incoming.commands import CommandCheck

VOCAB, BLOCK, LONGEST, SLOTS = 100, 4, 64, 8
HASH, ID = bytes(32), secrets.token_bytes(16)
WORKER = session_pb2.WorkerInfo(
    model=session_pb2.ModelInfo(max_model_len=LONGEST, vocab_size=VOCAB, block_size=BLOCK), total_slots=SLOTS
)


def sampling(**fields: Any) -> sampling_pb2.Sampling:
    return sampling_pb2.Sampling(**{"max_tokens": 4, "n": 1, "top_p": 1.0, **fields})


def prompt(**fields: Any) -> dict[str, Any]:
    return {
        "attempt_id": (1 << 64) - 1,
        "transfer_id": ID,
        "token_ids": range(9),
        "sampling": sampling(seed=(1 << 64) - 1),
        "block_hashes": [HASH, HASH],
        "time_left_ms": 1000,
        "request_id": "req 1~",
        **fields,
    }


def start(**fields: Any) -> session_pb2.ConnectRequest:
    command = session_pb2.Start(**prompt(**{"prefill_endpoint": "[::1]:50051", **fields}))
    return session_pb2.ConnectRequest(start=command)


def pooled(**fields: Any) -> session_pb2.Pooling:
    return session_pb2.Pooling(kind=session_pb2.POOLING_KIND_LAST, **fields)


def adapters(**fields: Any) -> session_pb2.ConnectRequest:
    return session_pb2.ConnectRequest(adapter_list=session_pb2.AdapterList(**fields))


def refusal(command: session_pb2.ConnectRequest) -> str:
    with pytest.raises(OutOfBounds) as refused:
        CommandCheck(WORKER).command(command)
    return str(refused.value)


@pytest.mark.parametrize(
    "command",
    [
        start(),
        start(first_choice=15, answered_tokens=8, first_token_in_ms=-(1 << 31), tbt_slo_ms=(1 << 32) - 1),
        start(kept_session=kept_session_pb2.KeptSession(id=ID, owner=bytes(8), keep_for_s=600.0)),
        start(sampling=sampling(n=8, stop_token_ids=[99], logit_bias={0: -100.0}, logprobs=20)),
        session_pb2.ConnectRequest(prefill=session_pb2.Prefill(**prompt(token_ids=range(63), block_hashes=[]))),
        session_pb2.ConnectRequest(cancel=session_pb2.Cancel(attempt_id=1 << 63)),
        adapters(version=MAX_EXACT, adapters=[session_pb2.Adapter(name="=weights", digest="weights:aa", grace_s=9)]),
    ],
)
def test_command_within_bounds_passes(command: session_pb2.ConnectRequest) -> None:
    CommandCheck(WORKER).command(command)


@pytest.mark.parametrize(
    ("field", "command"),
    [
        ("sampling.n", start(sampling=sampling(n=(1 << 32) - 1))),
        ("sampling.n", start(sampling=sampling(n=SLOTS + 1))),
        ("sampling.n", start(sampling=sampling(n=0))),
        ("sampling.beam_width", start(sampling=sampling(beam_width=1 << 31))),
        ("first_choice", start(first_choice=(1 << 32) - 1)),
        ("first_choice", start(first_choice=15, sampling=sampling(n=2))),
        ("token_ids", start(token_ids=[])),
        ("token_ids", start(token_ids=[VOCAB])),
        ("token_ids", start(token_ids=[1] * (LONGEST + 1))),
        ("sampling.max_tokens", start(sampling=sampling(max_tokens=60))),
        ("answered_tokens", start(answered_tokens=9)),
        ("transfer_id", start(transfer_id=b"")),
        ("transfer_id", start(transfer_id=bytes(15))),
        ("block_hashes", start(block_hashes=[HASH, HASH[:31]])),
        ("block_hashes", start(block_hashes=[HASH])),
        ("cache_root", start(cache_root=bytes(8))),
        ("prefill_endpoint", start(prefill_endpoint="unix:/run/docker.sock")),
        ("request_id", start(request_id="a\n\x1b[31mb")),
        ("request_id", start(request_id="r" * 129)),
        ("adapter", start(adapter="../x y")),
        ("sampling.stop_token_ids", start(sampling=sampling(stop_token_ids=[VOCAB]))),
        ("sampling.allowed_token_ids", start(sampling=sampling(allowed_token_ids=[VOCAB]))),
        ("sampling.logit_bias", start(sampling=sampling(logit_bias={VOCAB: 1.0}))),
        ("sampling.logit_bias", start(sampling=sampling(logit_bias={1: math.nan}))),
        ("sampling.bad_words", start(sampling=sampling(bad_words=[sampling_pb2.BadWord(token_ids=[VOCAB])]))),
        ("sampling.temperature", start(sampling=sampling(temperature=math.inf))),
        ("sampling.beam_stop", start(sampling=sampling(beam_stop=9))),
        ("sampling.structured.kind", start(sampling=sampling(structured=sampling_pb2.StructuredOutput(kind=77)))),  # type: ignore[arg-type]
        ("pooling.head_token_ids", start(pooling=pooled(head_token_ids=[VOCAB + 5]))),
        ("pooling.second_from", start(pooling=pooled(second_from=10))),
        ("kept_session.id", start(kept_session=kept_session_pb2.KeptSession(id=bytes(3)))),
        ("kept_session.keep_for_s", start(kept_session=kept_session_pb2.KeptSession(id=ID, keep_for_s=math.nan))),
        ("version", adapters(version=1 << 63)),
        ("adapters.name", adapters(version=1, adapters=[session_pb2.Adapter(name="a\nb")])),
        ("adapters.grace_s", adapters(version=1, adapters=[session_pb2.Adapter(name="a", grace_s=math.nan)])),
        ("adapters", adapters(version=1, adapters=[session_pb2.Adapter(name="a")] * 258)),
        ("path", session_pb2.ConnectRequest(prepare_adapter=session_pb2.PrepareAdapter(name="a", path="/a\0b"))),
        ("role", session_pb2.ConnectRequest(change_role=session_pb2.ChangeRole(role=9))),  # type: ignore[arg-type]
        ("router_id", session_pb2.ConnectRequest(adopt=session_pb2.Adopt(router_id=b"short"))),
    ],
)
def test_command_out_of_bounds_is_refused_by_field(field: str, command: session_pb2.ConnectRequest) -> None:
    assert refusal(command).startswith(f"{field}: ") or refusal(command).startswith(f"{field}.")
