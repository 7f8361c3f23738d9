"""Processes that benchmarks start."""

import asyncio
from pathlib import Path

from baton import child_environment
from baton.lab.harness.processes import Program, RunningProgram
from tests.fixtures.waiting import eventually, is_running

WAIT_S = 20.0


async def test_children_that_outlive_a_stopped_program_are_killed(tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    script = f"sleep 600 > /dev/null 2>&1 & echo $! > {noted}.part; mv {noted}.part {noted}; wait"
    program = Program("parent", ("sh", "-c", script), (), tmp_path / "log", child_environment())

    async def is_noted() -> bool:
        return noted.exists()

    async with asyncio.timeout(WAIT_S):
        async with RunningProgram(program) as running:
            await running.wait_until(is_noted)
            child = int(noted.read_text())
            assert is_running(child)
        await eventually(lambda: not is_running(child))
