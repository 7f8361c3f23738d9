"""A short run of chaos on a small stack: faults are proved, every token that clients saw is right. `./baton chaos` is
the long one.
"""

from pathlib import Path

from chaos.faults import Fault, FaultKind, Planned
from chaos.report import write
from chaos.run import Options, Run
from chaos.stack import Layout

MINUTES = 1.0  # at most: it ends when every fault of the plan was proven
PLAN = (
    Planned(Fault(FaultKind.KILL, "redis"), 0.3, at_once=True),
    Planned(Fault(FaultKind.STOP, "decode-1", lasts_s=0.6), 0.2, at_once=True),
    Planned(Fault(FaultKind.KILL, "decode-0"), 1.0, at_once=True),
)


async def test_streams_survive_a_killed_and_a_stopped_decode_worker_and_the_loss_of_redis(tmp_path: Path) -> None:
    said: list[str] = []
    layout = Layout(routers=1, prefill=1, decode=2)
    options = Options(MINUTES, 3, 4, PLAN, max_tokens=120, per_kind=1, wanted=len(PLAN), layout=layout)
    outcome = await Run(options, said.append).run(tmp_path)
    write(outcome, tmp_path)
    assert outcome.is_good, "\n".join([*said, (tmp_path / "report.md").read_text()])
    assert len(outcome.injected) == len(PLAN)
    assert (tmp_path / "timeline.svg").exists()
