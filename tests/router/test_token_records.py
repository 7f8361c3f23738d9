"""Token ids for `baton replay`: kept only if asked for, within a bound, and sent only if asked for."""

import json
import time
from typing import Any

import pytest

from baton.protos import admin_pb2
from baton.router.admin.timeline import Timelines
from baton.router.trace.record import RequestRecord, Timeline
from baton.router.trace.report import RecentReports, report_of
from baton.router.trace.token_records import OTHER_BYTES, TokenRecords
from baton.router.types.plain import from_plain
from baton.router.types.request import LogitRules, Sampling
from tests.fixtures.stalled import reported

SAMPLING = Sampling(6, 1 << 62, (2,), 1, LogitRules({5: -1.5}), temperature=0.5)


def answered(request_id: str, *tokens: int) -> RequestRecord:
    """Return the record of a request of 18 prompt tokens with this answer."""
    record = reported(Timeline(time.monotonic()), request_id)
    prepared: Any = record.prepared
    prepared.sampling = SAMPLING
    record.released = lambda: (tokens,)
    return record


def test_tokens_with_their_sampling_survive_json() -> None:
    records = TokenRecords(1 << 20)
    records.observe(record := answered("a", 7, 300))
    found = records.find("a", record.identity.trace_id)
    assert found is not None
    plain = json.loads(json.dumps(found.plain()))
    assert (plain["prompt"], plain["answers"]) == (list(range(18)), [[7, 300]])
    assert from_plain(Sampling, plain["sampling"]) == SAMPLING


def test_tokens_over_the_bound_are_those_of_the_newest_requests() -> None:
    records = TokenRecords(2 * OTHER_BYTES + 4 * 2 * 20)
    kept = [answered(request_id, 1, 2) for request_id in "abc"]
    for record in kept:
        records.observe(record)
    ids = [each.identity.trace_id for each in kept]
    assert [records.find(*each) is not None for each in zip("abc", ids, strict=True)] == [False, True, True]


def test_tokens_of_a_repeated_request_replace_the_older_ones() -> None:
    records = TokenRecords(2 * OTHER_BYTES)
    for token in range(5):
        records.observe(record := answered("a", token))
    found = records.find("a", record.identity.trace_id)
    assert found is not None and [list(each) for each in found.answers] == [[4]]


def test_tokens_of_a_rejected_request_and_without_memory_are_not_kept() -> None:
    rejected, none = reported(Timeline(0.0), "a"), TokenRecords(0)
    some = TokenRecords(1 << 20)
    some.observe(rejected)
    none.observe(record := answered("a", 1))
    assert some.find("a", rejected.identity.trace_id) is None and none.find("a", record.identity.trace_id) is None


@pytest.mark.parametrize("with_tokens", [False, True])
async def test_timeline_has_tokens_only_if_asked(with_tokens: bool) -> None:
    recent, records, record = RecentReports(), TokenRecords(1 << 20), answered("a", 7)
    recent.add(report_of(record, time.monotonic(), None))
    records.observe(record)
    asked = admin_pb2.GetTimelinesRequest(last_ms=3_600_000, with_inputs=True, with_tokens=with_tokens)
    [own] = [each async for each in Timelines(recent, tuple, None, tokens=records).collect(asked)]
    assert ("tokens" in json.loads(own.requests[0].decided)) is with_tokens
