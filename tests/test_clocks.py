"""Time is monotonic wherever something is decided: the wall clock is read in a few places, as a label and no more."""

import ast
import itertools
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.decode_worker.test_decode_service import answer, pair
from tests.fixtures.session_client import eventually
from tests.test_safety import ROOT, source_files

WALL = {("time", name) for name in ("time", "time_ns", "localtime", "gmtime", "strftime", "ctime", "asctime")}
WALL |= {(owner, name) for owner in ("datetime", "date") for name in ("now", "utcnow", "today", "fromtimestamp")}

ALLOWED = {
    "process/telemetry/spans.py": "a trace's anchor: the one place where its durations meet the time of day",
    "process/registry/membership.py": "an epoch where Redis gives none; only its order counts",
    "process/telemetry/logs.py": "the time of day of a line",
    "cli/bundle/command.py": "when the bundle was made, for its reader",
    "deploy/release.py": "the date of a heading in the changelog",
    "router/http/answers.py": "`created` of OpenAI's API",
    "router/http/batches/storage.py": "when files and batches expire, which outlive every process",
    "process/registry/worker_record.py": "a bound that grows, far above any count of changes",
    "router/model/template_process.py": "the date in a prompt, where the model's template states it",
}
"""What the wall clock is read for, by file."""

MAY_READ = re.compile(r"time\.time|from (time|datetime) import|" + "|".join({name for _, name in WALL} - {"time"}))
OUR_TOOLS = ("tests/", "lab/")
JUMPS_S = (3600, -3600, 7200, 0)
LONG_S = 600.0  # less than any jump, more than any machine stalls


def wall_clock_reads(source: str) -> Iterator[str]:
    """`line: what` for each use of the wall clock, called or passed on."""
    if not MAY_READ.search(source):  # to parse all sources takes long
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", None)
            if (owner, node.attr) in WALL:
                yield f"{node.lineno}: {owner}.{node.attr}"
        elif isinstance(node, ast.ImportFrom):
            names = {(node.module, alias.name) for alias in node.names}
            yield from (f"{node.lineno}: {module}.{name}" for module, name in sorted(names & WALL, key=str))


def test_sources_read_wall_clock_only_for_labels() -> None:
    reads = {
        name: list(wall_clock_reads(path.read_text()))
        for path in source_files(".py")
        if not (name := str(path.relative_to(ROOT))).startswith(OUR_TOOLS)
    }
    assert {name: found for name, found in reads.items() if found and name not in ALLOWED} == {}
    assert [name for name in ALLOWED if not reads.get(name)] == [], "no longer needed"


@pytest.mark.parametrize(
    "source",
    [
        "import time\ntime.time()",
        "from time import time_ns",
        "import datetime\ndatetime.datetime.now()",
        "from datetime import datetime\nclock = datetime.now",
    ],
)
def test_the_checker_finds(source: str) -> None:
    assert list(wall_clock_reads(source))


def test_clock_checker_allows_monotonic_time(tmp_path: Path) -> None:
    assert not list(wall_clock_reads("import time\ntime.monotonic(); time.perf_counter(); self.time()"))


async def test_wall_clock_jumps_change_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading is an hour or two off, to either side: no lease, deadline or grace ends for that."""
    wall, wall_ns, jumps = time.time, time.time_ns, itertools.cycle(JUMPS_S)

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
