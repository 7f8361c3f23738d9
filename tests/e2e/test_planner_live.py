"""The load shifts from long prompts to long answers on 2P+1D: the planner has a worker change, and nothing is lost."""

from pathlib import Path

import pytest

from baton.lab.benchmarks.cluster.role_change import RoleChangeSetup, rates, run
from baton.launch.tiny_checkpoint import write_tiny_checkpoint
from tests.e2e.stack import SILENCE_S
from tests.fixtures.forked_programs import fork_programs


async def test_the_planner_follows_the_load_and_nothing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork_programs(monkeypatch)
    monkeypatch.setenv("BATON_SESSION_SILENCE_S", SILENCE_S)
    write_tiny_checkpoint(tmp_path / "tiny")
    setup = RoleChangeSetup(seconds=3.0, slots=4, deadline_s=4.0)
    timeline = await run(tmp_path, setup, "act", *rates(setup))
    assert timeline.decode_workers[0][1] == 1
    assert max(count for _, count in timeline.decode_workers) == 2, (tmp_path / "act-router.log").read_text()[-2000:]
    assert [call for call in timeline.calls if call.result == "failed"] == []
    assert sum(call.result == "answered" for call in timeline.calls) > 10
