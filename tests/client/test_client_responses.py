from dataclasses import fields

import pytest

from baton.client.cluster import PageCounts
from baton.client.errors import ProtocolError
from baton.client.responses import cluster_status_from, event_from
from baton.client.types import Alternative, Delta, FinishReason, Timings, TokenLogprob, Usage
from baton.protos import admin_pb2, baton_pb2, report_pb2, session_pb2


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(Timings, baton_pb2.Timings), (Usage, baton_pb2.Usage), (PageCounts, report_pb2.PageCounts)],
)
def test_our_fields_are_those_of_the_proto(ours: type, theirs: type) -> None:
    assert [field.name for field in fields(ours)] == [field.name for field in theirs.DESCRIPTOR.fields]  # type: ignore[attr-defined]


def test_every_finish_reason_of_the_proto_is_known() -> None:
    for name in set(baton_pb2.FinishReason.keys()) - {"FINISH_REASON_UNSPECIFIED"}:
        event = event_from(baton_pb2.GenerateResponse(finished=baton_pb2.Finished(reason=name)))
        assert f"FINISH_REASON_{event.reason.name}" == name  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "response", [baton_pb2.GenerateResponse(), baton_pb2.GenerateResponse(finished=baton_pb2.Finished())]
)
def test_what_a_newer_server_may_send_is_not_guessed_at(response: baton_pb2.GenerateResponse) -> None:
    with pytest.raises(ProtocolError, match="does not know"):
        event_from(response)


@pytest.mark.parametrize(
    ("finished", "matched"),
    [
        (baton_pb2.Finished(reason=baton_pb2.FINISH_REASON_STOP, stop_text="END"), "END"),
        (baton_pb2.Finished(reason=baton_pb2.FINISH_REASON_STOP, stop_token_id=0), 0),
        (baton_pb2.Finished(reason=baton_pb2.FINISH_REASON_STOP), None),
    ],
)
def test_what_stopped_the_answer_is_text_or_token_or_nothing(
    finished: baton_pb2.Finished, matched: str | int | None
) -> None:
    event = event_from(baton_pb2.GenerateResponse(finished=finished))
    assert event.matched_stop == matched and event.reason is FinishReason.STOP  # type: ignore[union-attr]


def delta_of(tokens: int, **told: list[float]) -> baton_pb2.GenerateResponse:
    logprobs = baton_pb2.Logprobs(**told) if told else None  # type: ignore[arg-type]
    return baton_pb2.GenerateResponse(delta=baton_pb2.Delta(token_ids=range(5, 5 + tokens), logprobs=logprobs))


def test_each_token_has_its_logprob_and_its_alternatives() -> None:
    event = event_from(delta_of(2, chosen=[-1, -2], top_token_ids=[5, 9, 8, 6], top_logprobs=[-1, -3, -0.5, -2]))
    assert isinstance(event, Delta)
    assert event.logprobs == (
        TokenLogprob(5, -1, (Alternative(5, -1), Alternative(9, -3))),
        TokenLogprob(6, -2, (Alternative(8, -0.5), Alternative(6, -2))),
    )


def test_logprobs_that_were_not_asked_for_are_none() -> None:
    event = event_from(delta_of(2))
    assert isinstance(event, Delta) and event.logprobs is None


@pytest.mark.parametrize(
    "told",
    [
        {"chosen": [-1.0]},
        {"chosen": [-1.0, -2.0], "top_token_ids": [5, 6, 7], "top_logprobs": [-1.0, -2.0, -3.0]},
        {"chosen": [-1.0, -2.0], "top_token_ids": [5, 6], "top_logprobs": [-1.0]},
    ],
)
def test_logprobs_that_do_not_match_their_tokens_are_refused(told: dict[str, list[float]]) -> None:
    with pytest.raises(ProtocolError, match="do not match"):
        event_from(delta_of(2, **told))


def test_the_status_of_a_cluster_loses_nothing() -> None:
    model = session_pb2.ModelInfo(
        name="tiny", path="/m", max_model_len=64, vocab_size=9, dtype="float32", block_size=32
    )
    worker = session_pb2.WorkerInfo(
        worker_id="decode-0", role=session_pb2.ROLE_DECODE, pid=7, fingerprint=b"\xab", model=model, total_blocks=5
    )
    pages = report_pb2.PageCounts(total=5, free=1, cached=1, held=3, held_by_sequences=2, held_by_transfers=1)
    report = report_pb2.Report(limit_blocks=4, pages=pages, running_sequences=2, draining=True, steps=9)
    status = cluster_status_from(
        admin_pb2.GetStatusResponse(
            ready=True,
            queued_requests=1,
            workers=[
                admin_pb2.WorkerStatus(worker=worker, endpoint="h:1", connected=True, epoch=3, report=report),
                admin_pb2.WorkerStatus(worker=session_pb2.WorkerInfo(role=session_pb2.ROLE_PREFILL)),
            ],
        )
    )
    decode, prefill = status.workers
    assert (status.ready, status.queued_requests, status.registry_connected) == (True, 1, False)
    assert (decode.worker_id, decode.role, decode.pid, decode.fingerprint) == ("decode-0", "decode", 7, "ab")
    assert (decode.model.name, decode.model_path, decode.model.block_size) == ("tiny", "/m", 32)
    assert decode.load is not None
    assert decode.load.pages == PageCounts(5, 1, 1, 3, 2, 1)
    assert (decode.load.running_sequences, decode.load.draining, decode.load.steps) == (2, True, 9)
    assert (prefill.role, prefill.load) == ("prefill", None)
