"""Why a request went where it went: kept for the newest, bounded, with what was weighed and what happened."""

from dataclasses import replace
from typing import Any

import pytest

from baton.process.errors import NotFound
from baton.process.registry.worker_record import WorkerRole
from baton.router.placement.cluster import KEPT_NAMES, Cluster
from baton.router.placement.decide import Decision, decide, placement_of
from baton.router.trace.record import AttemptNote, Timeline
from baton.router.trace.report import RecentReports, RequestReport, report_of
from baton.router.types.events import Failed, FailureReason, FirstStep, KvReceived, PrefillTimings
from baton.router.types.placement import PlacementRequest, WorkerView
from baton.router.types.response import AnswerId
from baton.router.types.session import kept_session
from tests.fixtures.router_defaults import make_policy
from tests.fixtures.stalled import KeptExplainer, reported
from tests.router.clusters import described

REQUEST = PlacementRequest(fingerprint=b"f", block_tokens=4, prompt_tokens=18, max_tokens=6, choices=1)


def workers(prefill: int = 2, decode: int = 2) -> tuple[WorkerView, ...]:
    return (
        *(
            WorkerView(f"p{n}", WorkerRole.PREFILL, b"f", 100, 0, 0, 0, tokens_in_flight=100 * n)
            for n in range(prefill)
        ),
        *(WorkerView(f"d{n}", WorkerRole.DECODE, b"f", 100, 8, 100, 8 * (n == 0)) for n in range(decode)),
    )


def note(views: tuple[WorkerView, ...], attempt_id: int = 1, request: PlacementRequest = REQUEST) -> AttemptNote:
    policy = make_policy()
    decision = decide(request, views, policy)
    assert isinstance(decision, Decision)
    return AttemptNote(request, placement_of(request, decision, policy), decision, 1.0, 1.5, attempt_id=attempt_id)


def report(request_id: str) -> RequestReport:
    return report_of(reported(Timeline(0.0), request_id), 9.0, None)


def test_recent_reports_keep_the_newest() -> None:
    kept = RecentReports(kept=3)
    for name in ("a", "b", "a", "c"):
        kept.add(report(name))
    assert [kept.find(name) is not None for name in "abc"] == [True, True, True]
    kept.add(report("d"))
    assert [each.request_id for each in kept.newest()] == ["d", "c", "a"]


@pytest.mark.parametrize("prefix", ["", *AnswerId])
def test_request_is_found_by_its_id_however_an_answer_bears_it(prefix: str) -> None:
    kept = RecentReports()
    for name in ("mine", "cmpl-mine"):
        kept.add(report(f"{prefix}{name}"))
        kept.add(report(name))
    found = kept.find(f"{prefix}mine")
    assert found is not None and found.request_id == f"{prefix}mine", "an id that a client chose so goes first"
    alone = RecentReports()
    alone.add(report("mine"))
    found = alone.find(f"{prefix}mine")
    assert found is not None and found.request_id == "mine"


def test_explanation_names_the_session() -> None:
    timeline, explainer = Timeline(0.0), KeptExplainer()
    timeline.begin_attempt(note(workers()), 1.4)
    of_session = reported(timeline)
    prepared: Any = of_session.prepared
    prepared.kept_session = kept_session("agent-7", "", b"", "")
    explainer.observe(of_session)
    assert explainer.explain("r").session_id == "agent-7"


def test_request_is_found_by_its_trace_of_several_the_newest() -> None:
    timeline, explainer = Timeline(0.0), KeptExplainer()
    timeline.begin_attempt(note(workers()), 1.4)
    for name, trace_id in (("a", "1" * 32), ("b", "2" * 32), ("c", "1" * 32)):
        record = reported(timeline, name)
        record.identity = replace(record.identity, trace_id=trace_id)
        explainer.observe(record)
    assert [explainer.explain(digit * 32).request_id for digit in "12"] == ["c", "b"]
    with pytest.raises(NotFound):
        explainer.explain("3" * 32)


def test_record_tells_of_every_attempt_and_its_candidates() -> None:
    timeline, explainer = Timeline(0.0), KeptExplainer(str.upper)
    timeline.begin_attempt(note(workers()), 1.4)
    timeline.take_first_step(FirstStep(1, (), PrefillTimings(2.0, (3.0,), 9.0, cached_tokens=0)), 1.75)
    timeline.take_failure(Failed(1, "p0", FailureReason.WORKER_LOST, "it fell silent"), 2.0)
    timeline.begin_attempt(note(workers(), attempt_id=2), 2.4)
    timings = PrefillTimings(2.0, (3.0, 4.0), 9.0, cached_tokens=12, fetched_tokens=4)
    timeline.take_first_step(FirstStep(2, (), timings), 3.0)
    timeline.take_kv_received(KvReceived(2, 640, 0.5, 0.25, 0.0, 1.0, "shared_memory", cached_tokens=4))
    explainer.observe(reported(timeline))

    explained = explainer.explain("r")
    assert (explained.status, explained.age_s, explained.prompt_tokens) == ("OK", 9.0, 18)
    first, second = explained.attempts
    assert (first.failure, first.failed_endpoint) == ("WORKER_LOST: it fell silent", "p0")
    assert (second.failure, second.transport) == ("", "shared_memory")
    assert (first.actual["ttft_ms"], second.actual["ttft_ms"]) == (250.0, 1500.0), "each attempt has its own"
    assert dict(second.actual) | {"cached_tokens": 8, "prefill_ms": 7, "transfer_bytes": 640} == dict(second.actual)
    candidates = {each.worker_id: each for each in second.candidates}
    assert [candidates[name].chosen for name in ("P0", "P1", "D0", "D1")] == [True, False, True, False]
    assert candidates["P1"].terms["tokens_in_flight"] == 100
    assert candidates["D1"].excluded == "no slot is free in its batch"
    assert candidates["P1"].excluded == ""


def test_unplaced_or_forgotten_request_is_not_found() -> None:
    explainer = KeptExplainer()
    explainer.observe(reported(Timeline(0.0)))
    with pytest.raises(NotFound):
        explainer.explain("r")


def test_worker_lent_to_an_oversized_request_does_not_lack_credit() -> None:
    large = PlacementRequest(b"f", block_tokens=4, prompt_tokens=80, max_tokens=300, choices=3, preferred_decode="d1")
    whole = tuple(WorkerView(name, WorkerRole.DECODE, b"f", 100, 8, 100, 8) for name in ("d0", "d1"))
    timeline, explainer = Timeline(0.0), KeptExplainer()
    timeline.begin_attempt(note(whole, request=large), 1.4)
    explainer.observe(reported(timeline))
    other, taken = explainer.explain("r").attempts[0].candidates
    assert large.charged_blocks > whole[0].limit_blocks
    assert taken.chosen and taken.excluded == ""
    assert other.excluded == "the request stays with the decode worker that it had"


def test_cache_of_decode_is_compared_where_it_computed_the_prompt() -> None:
    timeline, explainer = Timeline(0.0), KeptExplainer()
    timeline.begin_attempt(note(workers(prefill=0)), 1.4)
    timeline.take_first_step(FirstStep(1, (), PrefillTimings(2.0, (3.0,), 9.0, cached_tokens=8)), 3.0)
    explainer.observe(reported(timeline))
    actual = explainer.explain("r").attempts[0].actual
    assert actual["decode_cached_tokens"] == 8 and "cached_tokens" not in actual


def test_lost_worker_keeps_its_name_for_a_while() -> None:
    description = described("decode-7", WorkerRole.DECODE)
    cluster = Cluster()
    for endpoint in ("h:1", *(f"h:{number}" for number in range(2, KEPT_NAMES + 2))):
        assert cluster.name_of(endpoint) == endpoint
        cluster.add(endpoint, WorkerRole.DECODE)
        cluster.connected(endpoint, description, epoch=1)
        cluster.remove(endpoint)
        assert cluster.name_of(endpoint) == "decode-7"
    assert (cluster.name_of("h:1"), cluster.name_of("h:2")) == ("h:1", "decode-7")
