"""W3C traceparent, in and out."""

import pytest

from baton.process.telemetry.trace_context import new_trace, parse_traceparent

_TRACE = "0af7651916cd43dd8448eb211c80319c"
_SPAN = "b7ad6b7169203331"


def test_traceparent_survives_the_round_trip() -> None:
    for flags, sampled in (("01", True), ("00", False)):
        place = parse_traceparent(f"00-{_TRACE}-{_SPAN}-{flags}", "vendor=1")
        assert place is not None
        assert (place.trace_id, place.span_id, place.sampled, place.tracestate) == (_TRACE, _SPAN, sampled, "vendor=1")
        assert place.traceparent == f"00-{_TRACE}-{_SPAN}-{flags}"


def test_later_version_is_read_by_its_known_part() -> None:
    assert parse_traceparent(f"cc-{_TRACE}-{_SPAN}-01-more") is not None


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "garbage",
        f"ff-{_TRACE}-{_SPAN}-01",
        f"00-{_TRACE}-{_SPAN}-01-more",
        f"00-{'0' * 32}-{_SPAN}-01",
        f"00-{_TRACE}-{'0' * 16}-01",
        f"00-{_TRACE.upper()}-{_SPAN}-01",
        f"00-{_TRACE}-{_SPAN}-01\n",
    ],
)
def test_malformed_traceparent_is_none(text: str | None) -> None:
    assert parse_traceparent(text) is None


def test_child_keeps_the_trace_and_gets_its_own_span() -> None:
    parent = new_trace()
    child = parent.child()
    assert child.trace_id == parent.trace_id
    assert child.span_id != parent.span_id
