"""No lease, deadline or grace depends on the wall clock. ruff's rule TID251 finds what reads it."""

import itertools
import sys
import time

import pytest

from tests.decode_worker.test_decode_service import answer, pair
from tests.fixtures.session_client import eventually

JUMPS_S = (3600, -3600, 7200, 0)
LONG_S = 600.0  # less than any jump, more than any machine stalls


async def test_wall_clock_jumps_change_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading is an hour or two off, to either side: no lease, deadline or grace ends for that."""
    wall, wall_ns, jumps = time.time, time.time_ns, itertools.cycle(JUMPS_S)  # noqa: TID251

    def jumping() -> float:
        # gRPC makes a time of day of a timeout, and at once, in C, a monotonic time of that: it cannot jump in between
        asked_by = str(sys._getframe(1).f_globals["__name__"])
        return wall() + (0 if asked_by.startswith("grpc") else next(jumps))

    monkeypatch.setattr(time, "time", jumping)
    monkeypatch.setattr(time, "time_ns", lambda: wall_ns() + next(jumps) * 10**9)
    prefill = {"lease_s": LONG_S, "park_s": LONG_S, "grace_s": LONG_S}
    async with pair(prefill, grace_s=LONG_S, lease_s=LONG_S) as workers:
        for attempt in range(1, 9):
            await workers.ask(attempt, max_tokens=6)
        await eventually(lambda: all(len(workers.router.tokens(attempt)) == 6 for attempt in range(1, 9)))
        assert workers.router.tokens(8) == answer(0, prompt_tokens=10, max_tokens=6)
        assert workers.prefill.table.counters.expired == 0
