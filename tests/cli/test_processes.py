"""Child processes: prefixed output, signals, and exit with their parent."""

import asyncio
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from baton.launch import child
from baton.launch.processes import ChildProcess, LineWriter, ProcessSpec, Stage
from tests.fixtures.waiting import is_running, wait_until


def spec(*command: str, cores: tuple[int, ...] = (), noise: tuple[str, ...] = ()) -> ProcessSpec:
    environment = {**os.environ, "WORD": "hello"}
    return ProcessSpec("worker-0", command, Stage.WORKER, 5.0, environment, cores=cores, noise=noise)


async def output_of(
    code: str, cores: tuple[int, ...] = (), noise: tuple[str, ...] = ()
) -> tuple[int, list[str], list[str]]:
    output, errors = io.StringIO(), io.StringIO()
    process = await ChildProcess.start(
        spec(sys.executable, "-c", code, cores=cores, noise=noise), LineWriter(output), LineWriter(errors)
    )
    exit_code = await asyncio.wait_for(process.wait(), 20)
    return exit_code, output.getvalue().splitlines(), errors.getvalue().splitlines()


async def test_child_output_is_prefixed_with_its_name() -> None:
    code = "import os, sys; print(os.environ['WORD']); print('bad', file=sys.stderr); sys.exit(7)"
    assert await output_of(code) == (7, ["worker-0  | hello"], ["worker-0  | bad"])


async def test_child_output_drops_noise() -> None:
    code = "print('1 WARNING Memory overcommit!'); print('2 Failed listening'); print('3 overcommit', end='')"
    assert (await output_of(code, noise=("overcommit",)))[1] == ["worker-0  | 2 Failed listening"]


async def test_child_output_keeps_unterminated_line() -> None:
    assert (await output_of("print('one'); print('two', end='')"))[1] == ["worker-0  | one", "worker-0  | two"]


async def test_child_output_of_progress_bar_is_its_last_state() -> None:
    assert (await output_of(r"print('10%\r50%\r100%')"))[1] == ["worker-0  | 100%"]


async def test_child_output_splits_long_lines() -> None:
    _, lines, _ = await output_of("print('x' * 300_000); print('after')")
    assert "".join(line.removeprefix("worker-0  | ") for line in lines[:-1]) == "x" * 300_000
    assert lines[-1] == "worker-0  | after"


async def test_child_output_replaces_invalid_bytes() -> None:
    _, lines, _ = await output_of(r"import sys; sys.stdout.buffer.write(b'\xff\n')")
    assert lines == ["worker-0  | �"]


async def test_child_is_pinned_to_cores() -> None:
    core = min(os.sched_getaffinity(0))
    _, lines, _ = await output_of("import os; print(os.sched_getaffinity(0))", cores=(core,))
    assert lines == [f"worker-0  | {{{core}}}"]


async def test_child_with_missing_command_says_so() -> None:
    errors = io.StringIO()
    process = await ChildProcess.start(spec("/nonexistent/program"), LineWriter(io.StringIO()), LineWriter(errors))
    assert await asyncio.wait_for(process.wait(), 20) == 1
    assert "cannot run /nonexistent/program" in errors.getvalue()


def test_line_writer_writes_nothing_more_to_a_closed_pipe() -> None:
    written: list[str] = []

    class ClosedPipe(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            raise BrokenPipeError

    writer = LineWriter(ClosedPipe())
    writer.write("lost")
    writer.write("lost too")
    assert written == ["lost\n"]


def test_child_dies_with_killed_parent(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    grandchild = (
        f"import os, pathlib, time; pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid())); time.sleep(60)"
    )
    launcher = [sys.executable, "-I", "-S", child.__file__]
    parent = (
        "import os, subprocess, sys, time\n"
        f"subprocess.Popen([*{launcher!r}, str(os.getpid()), '', sys.executable, '-c', {grandchild!r}])\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", parent])
    try:
        wait_until(lambda: pid_file.exists() and pid_file.read_text() != "")
        pid = int(pid_file.read_text())
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not is_running(pid))


def test_child_without_parent_does_not_start() -> None:
    command = [sys.executable, "-I", "-S", child.__file__, "1", "", "/bin/echo", "started"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")


async def test_child_signal_after_exit_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    process = await ChildProcess.start(spec("/bin/true"), LineWriter(io.StringIO()), LineWriter(io.StringIO()))
    assert await asyncio.wait_for(process.wait(), 20) == 0
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda process_id, number: sent.append((process_id, number)))
    process.send(signal.SIGTERM)
    assert sent == []
