"""Figures of drafts, from the messages of a worker to the request's trace and to those who ask about it."""

import pytest

from baton.protos import session_pb2
from baton.router.admin.requests import recent_request
from baton.router.fleet import wire
from baton.router.trace.record import GapSummary, RequestRecord
from baton.router.trace.report import report_of
from baton.router.trace.spans import request_spans
from baton.router.types.events import Drafts, SequenceOutput
from baton.text.causes import StallCause
from baton.worker.wire import STALL_CAUSES
from tests.fixtures.stalled import running

GAPS = GapSummary(10.0, 12.0, 14.0, (), 0)


def arrived(*drafts: session_pb2.Drafts) -> list[SequenceOutput]:
    """Two outputs of a step, as the router has them."""
    outputs = [session_pb2.SequenceOutput(attempt_id=1, offset=1 + index, token_ids=[5]) for index in range(2)]
    gap = session_pb2.Gap(output=1, usual_ms=10.0)
    step = session_pb2.StepOutputs(outputs=outputs, made_us=1000, gaps=[gap], drafts=drafts)
    events = wire.attempt_events(session_pb2.ConnectResponse(step_outputs=step), "d0")
    return [event for event in events if isinstance(event, SequenceOutput)]


def answered(*drafts: session_pb2.Drafts) -> RequestRecord:
    record = running()
    record.prepared = None
    for output in arrived(*drafts):
        record.timeline.take_decode_output(1, 0, output.offset, len(output.token_ids), 10.0, output.made)
    record.gaps = GAPS
    return record


SAVED = session_pb2.Drafts(output=0, drafted_tokens=5, accepted_tokens=3, saved_ms=28.0)
LOST = session_pb2.Drafts(output=1, drafted_tokens=4, accepted_tokens=0, saved_ms=-2.0)


def test_each_output_has_its_draft_figures_and_gap_causes() -> None:
    first, second = (output.made for output in arrived(SAVED, LOST))
    assert first is not None and first.drafts == Drafts(5, 3, 28.0) and first.gap is None
    assert second is not None and second.drafts == Drafts(4, 0, -2.0) and second.gap is not None


def test_draft_figures_are_summed_in_root_and_decode_span() -> None:
    spans = {span.name: span.attributes for span in request_spans(answered(SAVED, LOST), 20.0)}
    for name in ("text_completion tiny", "decode"):
        figures = [spans[name][f"baton.{each}"] for each in ("drafted_tokens", "accepted_tokens", "drafts_saved_ms")]
        assert figures == [9, 3, 26.0]


def test_without_drafts_no_attribute_says_so() -> None:
    for span in request_spans(answered(), 20.0):
        assert not any("draft" in name for name in span.attributes)


def test_draft_figures_are_shown_to_the_operator() -> None:
    drafted, plain = (
        recent_request(report_of(record, 20.0, GAPS), 20.0, str.upper) for record in (answered(SAVED), answered())
    )
    assert (drafted.drafts.drafted_tokens, drafted.drafts.accepted_tokens) == (5, 3)
    assert drafted.drafts.saved_ms == pytest.approx(28.0)
    assert not plain.HasField("drafts")


@pytest.mark.parametrize("cause", list(STALL_CAUSES))
def test_every_cause_that_a_worker_names_is_known_to_its_router(cause: StallCause) -> None:
    [output] = [session_pb2.SequenceOutput(attempt_id=1, offset=1, token_ids=[5])]
    gap = session_pb2.Gap(causes=[session_pb2.GapCause(cause=STALL_CAUSES[cause], ms=1.0)])
    step = session_pb2.StepOutputs(outputs=[output], made_us=1000, gaps=[gap])
    [event] = wire.attempt_events(session_pb2.ConnectResponse(step_outputs=step), "d0")
    assert isinstance(event, SequenceOutput) and event.made is not None and event.made.gap is not None
    assert [part.cause for part in event.made.gap.causes] == [cause]
