"""If an engine hangs in a step, its process exits and logs where, and another worker serves the request."""

import asyncio

from baton.process.serving.exit_codes import ExitCode
from tests.e2e.faulty import HANG_FILE, STALL_S, stream
from tests.e2e.stack import Stack
from tests.fixtures.hanging_worker import HANGS_ON

PROMPT = list(HANGS_ON)
TOKENS = 12


async def test_worker_with_a_hanging_engine_exits_and_its_request_is_answered(faulty: Stack) -> None:
    streaming = asyncio.create_task(stream(faulty, PROMPT, TOKENS))
    hung = faulty.folder / HANG_FILE
    named = lambda: hung.exists() and bool(hung.read_text())  # noqa: E731
    await asyncio.to_thread(faulty.wait_for, named, 30, "an engine that hangs")
    process = faulty.processes[hung.read_text()]
    assert process.popen is not None
    assert await asyncio.to_thread(process.popen.wait, 15 * STALL_S) == ExitCode.STALLED
    assert "the engine has made no progress" in process.text() and "hang_once" in process.text()
    process.start()
    assert len(await streaming) == TOKENS
    assert await streaming == await stream(faulty, PROMPT, TOKENS)
    await asyncio.to_thread(faulty.wait_ready)
    [worker] = [each for each in faulty.status().workers if each.worker_id == process.name]
    assert worker.deaths
