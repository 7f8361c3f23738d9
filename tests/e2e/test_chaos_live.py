"""Short chaos run with drafts and the disk tier: faults are proved, and every token that clients saw is right.

`./baton chaos` is the long run.
"""

from pathlib import Path

from baton.lab.chaos.faults import Fault, FaultKind, Planned
from baton.lab.chaos.report import write
from baton.lab.chaos.run import ChaosOptions, ChaosRun
from tests.e2e.stack import IDLE_S

MINUTES = 3.0  # at most: it ends when all faults are proved
PLAN = (
    Planned(Fault(FaultKind.KILL, "redis"), 0.3, at_once=True),
    Planned(Fault(FaultKind.STOP, "decode-1", lasts_s=0.6), 0.2, at_once=True),
    Planned(Fault(FaultKind.KILL, "decode-0"), 1.0, at_once=True),
    Planned(Fault(FaultKind.KILL, "prefill-0"), 1.0, at_once=False),
    Planned(Fault(FaultKind.KILL, "router-1"), 1.0, at_once=False),
    Planned(Fault(FaultKind.DISK_FULL, "disk", lasts_s=1.0), 0.2, at_once=False),
    Planned(Fault(FaultKind.RESTART, "decode-1"), 1.0, at_once=False),
)


async def test_streams_survive_kills_stops_and_restarts(tmp_path: Path) -> None:
    said: list[str] = []
    options = ChaosOptions(
        MINUTES, 3, 4, PLAN, max_tokens=120, per_kind=1, wanted=len(PLAN), speculate="ngram", tier=True,
        pages_free_s=IDLE_S,
    )  # fmt: skip
    outcome = await ChaosRun(options, said.append).run(tmp_path)
    write(outcome, tmp_path)
    assert outcome.is_good, "\n".join([*said, (tmp_path / "report.md").read_text()])
    assert len(outcome.injected) == len(PLAN)
    assert (tmp_path / "report.json").exists()
