"""Report of a decision for `baton replay`: it has all inputs, and neither prompt nor answer."""

import json
import time
from dataclasses import replace

import pytest

from baton.protos import admin_pb2
from baton.router.admin import timeline
from baton.router.admin.timeline import Timelines
from baton.router.placement.policies import Strategy
from baton.router.trace.decided import decided
from baton.router.trace.record import Timeline
from baton.router.trace.report import RecentReports, RequestReport, report_of
from baton.router.types.placement import PlacementRequest
from tests.fixtures.stalled import reported, running
from tests.router.test_decision_record import note, workers


def report(request: PlacementRequest) -> RequestReport:
    now = time.monotonic()
    timeline = Timeline(now)
    timeline.begin_attempt(note(workers(), request=request), now)
    return report_of(reported(timeline), now, None)


REQUEST = PlacementRequest(b"f", 4, 18, 6, 1, prefix=b"\xab\xcd")


def test_decided_has_the_inputs_of_a_placement() -> None:
    [placement] = decided(report(REQUEST))["placements"]
    assert placement["request"]["prompt_tokens"] == 18
    assert [each["endpoint"] for each in placement["workers"]] == ["p0", "p1", "d0", "d1"]
    assert placement["placement"]["decode"] == "d0"


def test_decided_omits_the_hash_of_the_prefix_unless_the_policy_depends_on_it() -> None:
    own = report(REQUEST)
    assert "abcd" not in json.dumps(decided(own))
    [only] = own.notes
    by_prefix = replace(own, notes=(replace(only, placement=only.placement._replace(policy=Strategy.PREFIX_HASH)),))
    assert decided(by_prefix)["placements"][0]["request"]["prefix"] == "abcd"


def test_decided_of_a_running_request_is_empty() -> None:
    assert decided(report_of(running(), 9.0, None)) == {}


async def own_timeline(recent: RecentReports, with_inputs: bool) -> admin_pb2.ProcessTimeline:
    asked = admin_pb2.GetTimelinesRequest(last_ms=3_600_000, with_inputs=with_inputs)
    found = Timelines(recent, tuple, None, settings={"policy": {}}).collect(asked)
    [own] = [each async for each in found]
    return own


@pytest.mark.parametrize("with_inputs", [False, True])
async def test_timeline_has_decided_only_if_asked(with_inputs: bool) -> None:
    recent = RecentReports()
    recent.add(report(REQUEST))
    own = await own_timeline(recent, with_inputs)
    assert (bool(own.decided), bool(own.requests[0].decided)) == (with_inputs, with_inputs)


async def test_timeline_over_the_limit_has_decided_of_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    recent = RecentReports()
    for _ in range(3):
        recent.add(report(REQUEST))
    monkeypatch.setattr(timeline, "MOST_DECIDED_BYTES", 2 * len(json.dumps(decided(report(REQUEST)))) + 5)
    own = await own_timeline(recent, with_inputs=True)
    assert [bool(each.decided) for each in own.requests] == [False, True, True]
