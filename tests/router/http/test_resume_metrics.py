"""What failed attempts, and answers that went on, come to in the metrics."""

from dataclasses import replace
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from baton.router.dispatcher import RequestCounts
from baton.router.http.metrics import RequestMetrics
from baton.router.placement.decide import Placement
from baton.router.trace.record import AttemptNote, RequestRecord, Resume, Timeline
from baton.router.types.events import Failed, FailureReason
from baton.router.types.request import Operation

PLACED = Placement("p", "d", 0, 0, 0, 0, 1, 1)


def test_failed_attempts_and_resumed_streams_are_counted_with_their_gaps() -> None:
    nothing: Any = None
    timeline = Timeline(0.0)
    for reason in (FailureReason.WORKER_DIED, None):
        failed = Failed(1, "d", reason, "") if reason else None
        timeline.notes.append(AttemptNote(nothing, PLACED, None, 0.0, 0.0, failed=failed))
    timeline.resumes.append(Resume(2.0, 700.0, 0, 5))
    begun = RequestRecord.begin(Operation.GENERATE, None)
    record = replace(begun, model="m", timeline=timeline)
    metrics = RequestMetrics(RequestCounts())
    metrics.observe(record)
    registry = CollectorRegistry()
    registry.register(metrics)
    text = generate_latest(registry).decode()
    assert 'baton:attempts_failed_total{reason="worker_died"} 1.0' in text
    assert 'baton:streams_resumed_total{engine="router",model_name="m"} 1.0' in text
    assert 'baton:resume_gap_seconds_bucket{engine="router",le="0.75",model_name="m"} 1.0' in text
    assert 'baton:resume_gap_seconds_bucket{engine="router",le="0.5",model_name="m"} 0.0' in text
