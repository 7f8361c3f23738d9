"""Processes that benchmarks start."""

import asyncio
from pathlib import Path

from baton import child_environment
from baton.lab.harness.processes import Program, RunningProgram

WAIT_S = 20.0


def is_running(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except FileNotFoundError:
        return False


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
        while is_running(child):
            await asyncio.sleep(0.01)
