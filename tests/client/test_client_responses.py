from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import pytest

from baton.client.cluster import (
    AdapterStatus,
    ClusterStatus,
    PageCounts,
    RecentRequest,
    RequestExplanation,
    RequestTotals,
)
from baton.client.convert import value_from
from baton.client.errors import ProtocolError
from baton.client.responses import embeddings_from, event_from, timeline_from
from baton.client.types import Alternative, Delta, FinishReason, Model, PromptPart, Scores, TokenLogprob
from baton.client.why import RequestWhy
from baton.protos import admin_pb2, baton_pb2, report_pb2, session_pb2


def fill(message: Any) -> Any:
    """Set every field of a message and of those in it to a value other than its default."""
    for each in message.DESCRIPTOR.fields:
        value: Any = {each.CPPTYPE_STRING: b"7" if each.type == each.TYPE_BYTES else "7"}.get(each.cpp_type, 1)
        target = getattr(message, each.name)
        if each.message_type is not None and each.message_type.GetOptions().map_entry:
            target["7"] = 1
        elif each.cpp_type == each.CPPTYPE_MESSAGE:
            fill(target.add() if each.is_repeated else target)
        elif each.is_repeated:
            target.append(value)
        else:
            setattr(message, each.name, value)
    return message


def defaults_in(value: Any, path: str = "") -> list[str]:
    """Return the paths of all fields of a dataclass, and of those in it, that are empty."""
    if isinstance(value, tuple):
        return [found for each in value for found in defaults_in(each, path)] or ([] if value else [path])
    if is_dataclass(value):
        return [
            found for each in fields(value) for found in defaults_in(getattr(value, each.name), f"{path}.{each.name}")
        ]
    return [] if value else [path]


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (partial(value_from, ClusterStatus), admin_pb2.GetStatusResponse()),
        (partial(value_from, RequestExplanation), admin_pb2.ExplainResponse()),
        (partial(value_from, RecentRequest), admin_pb2.RecentRequest()),
        (partial(value_from, RequestWhy), admin_pb2.WhyResponse()),
        (partial(value_from, AdapterStatus), admin_pb2.AdapterStatus()),
        (timeline_from, admin_pb2.ProcessTimeline()),
        (embeddings_from, baton_pb2.EmbedResponse()),
        (partial(value_from, Scores), baton_pb2.ScoreResponse()),
        (partial(value_from, Model), baton_pb2.Model()),
        (lambda message: event_from(message), baton_pb2.GenerateResponse(finished=fill(baton_pb2.Finished()))),
    ],
    ids=lambda each: type(each).__name__,
)
def test_conversion_of_a_full_message_leaves_no_field_empty(read: Any, message: Any) -> None:
    value = read(message if isinstance(message, baton_pb2.GenerateResponse) else fill(message))
    models = (".workers.model.parent", ".workers.model.version")  # a worker states neither
    assert [path for path in defaults_in(value) if path not in models] == []


def test_empty_status_converts_to_none_for_absent_fields() -> None:
    status = value_from(ClusterStatus, admin_pb2.GetStatusResponse(workers=[admin_pb2.WorkerStatus()]))
    worker = status.workers[0]
    assert (status.planner, status.latency, worker.load, worker.cache_view, worker.tbt) == (None,) * 5
    assert (worker.role, worker.roles, status.requests) == ("unknown", (), RequestTotals())


def test_timeline_of_another_clock_is_moved_to_the_routers() -> None:
    message = admin_pb2.ProcessTimeline(offset_us=100)
    message.timeline.requests.add(arrived_us=5, first_token_us=7).transfer.began_us = 6
    step = message.timeline.steps.add(began_us=1, ended_us=2)
    step.prompts.add(request_number=3, tokens=4)
    found = timeline_from(message)
    request = found.worker_requests[0]
    assert (request.arrived_us, request.first_token_us, request.last_token_us) == (105, 107, None)
    assert request.transfer is not None and request.transfer.began_us == 106
    assert (found.steps[0].began_us, found.steps[0].prompts, found.role) == (101, {3: 4}, "router")


def test_every_finish_reason_of_the_proto_is_known() -> None:
    for name in set(baton_pb2.FinishReason.keys()) - {"FINISH_REASON_UNSPECIFIED"}:
        event = event_from(baton_pb2.GenerateResponse(finished=baton_pb2.Finished(reason=name)))
        assert f"FINISH_REASON_{event.reason.name}" == name  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "response", [baton_pb2.GenerateResponse(), baton_pb2.GenerateResponse(finished=baton_pb2.Finished())]
)
def test_unknown_response_of_a_newer_server_is_an_error(response: baton_pb2.GenerateResponse) -> None:
    with pytest.raises(ProtocolError, match="unknown"):
        event_from(response)


@pytest.mark.parametrize(
    ("finished", "matched"),
    [
        (baton_pb2.Finished(reason=baton_pb2.FINISH_REASON_STOP, stop_text="END"), "END"),
        (baton_pb2.Finished(reason=baton_pb2.FINISH_REASON_STOP, stop_token_id=0), 0),
        (baton_pb2.Finished(reason=baton_pb2.FINISH_REASON_STOP), None),
    ],
)
def test_stop_is_a_text_or_a_token_or_nothing(finished: baton_pb2.Finished, matched: str | int | None) -> None:
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


def test_status_of_a_cluster_loses_nothing() -> None:
    model = session_pb2.ModelInfo(
        name="tiny", path="/m", max_model_len=64, vocab_size=9, dtype="float32", block_size=32
    )
    worker = session_pb2.WorkerInfo(
        worker_id="decode-0", role=session_pb2.ROLE_DECODE, pid=7, fingerprint=b"\xab", model=model, total_blocks=5
    )
    pages = report_pb2.PageCounts(total=5, free=1, cached=1, held=3, held_by_sequences=2, held_by_transfers=1)
    report = report_pb2.Report(limit_blocks=4, pages=pages, running_sequences=2, draining=True, steps=9)
    status = value_from(
        ClusterStatus,
        admin_pb2.GetStatusResponse(
            ready=True,
            queued_requests=1,
            workers=[
                admin_pb2.WorkerStatus(worker=worker, endpoint="h:1", connected=True, epoch=3, report=report),
                admin_pb2.WorkerStatus(worker=session_pb2.WorkerInfo(role=session_pb2.ROLE_PREFILL)),
            ],
        ),
    )
    decode, prefill = status.workers
    assert (status.ready, status.queued_requests, status.registry_connected) == (True, 1, False)
    assert (decode.worker_id, decode.role, decode.pid, decode.fingerprint) == ("decode-0", "decode", 7, "ab")
    assert (decode.model.name, decode.model_path, decode.model.block_size) == ("tiny", "/m", 32)
    assert decode.load is not None
    assert decode.load.pages == PageCounts(5, 1, 1, 3, 2, 1)
    assert (decode.load.running_sequences, decode.load.draining, decode.load.steps) == (2, True, 9)
    assert (prefill.role, prefill.load) == ("prefill", None)


def test_part_is_read_from_its_message() -> None:
    logprobs = baton_pb2.Logprobs(chosen=[-1], top_token_ids=[5, 9], top_logprobs=[-1, -3])
    part = baton_pb2.PromptPart(offset=1, token_ids=[5], text="x", logprobs=logprobs)
    event = event_from(baton_pb2.GenerateResponse(prompt=part))
    assert isinstance(event, PromptPart)
    assert (event.offset, event.token_ids, event.text) == (1, (5,), "x")
    assert event.logprobs is not None
    assert [(each.token_id, each.logprob, len(each.top)) for each in event.logprobs] == [(5, -1.0, 2)]
