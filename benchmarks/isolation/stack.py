"""The servers that `baton bench isolation` compares, vLLM's among them, each from a command line of its own."""

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO
from urllib.error import URLError
from urllib.request import urlopen

from baton import IMPORT_PATH
from baton.benchmarks.isolation.figures import EngineTime, Step
from baton.launch.core_plan import write_cores
from baton.launch.errors import CommandFailed
from baton.launch.processes import ChildProcess, LineWriter, ProcessSpec, Stage

OUR_CODE = {"PYTHONPATH": str(IMPORT_PATH)}
GRACE_S = 20.0
POLL_S = 0.1
LOG_TAIL_BYTES = 2000


@dataclass(frozen=True, slots=True)
class Program:
    """A process to measure beside; `log` is where all it prints goes."""

    name: str
    command: tuple[str, ...]
    cores: tuple[int, ...]
    log: Path
    environment: Mapping[str, str]


class RunningProgram:
    """Started on entering; ended, by force if need be, on leaving."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._log: TextIO | None = None
        self._child: ChildProcess | None = None
        self._ended: asyncio.Task[int] | None = None

    async def __aenter__(self) -> Self:
        program = self._program
        spec = ProcessSpec(
            program.name, program.command, Stage.WORKER, GRACE_S, program.environment, cores=program.cores
        )
        self._log = program.log.open("a")
        writer = LineWriter(self._log)
        self._child = await ChildProcess.start(spec, writer, writer)
        self._ended = asyncio.create_task(self._child.wait())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._child is None or self._ended is None or self._log is None:
            return
        self._child.send(signal.SIGTERM)
        _, running = await asyncio.wait([self._ended], timeout=GRACE_S)
        if running:
            self._child.send(signal.SIGKILL)
        await self._ended
        self._log.close()

    @property
    def pid(self) -> int:
        if self._child is None:
            raise RuntimeError(f"{self._program.name} was not started")
        return self._child.pid

    async def wait_until(self, is_ready: Callable[[], Awaitable[bool]], timeout_s: float) -> None:
        """Raises: CommandFailed where it ends before, or takes too long."""
        loop, ended = asyncio.get_running_loop(), self._ended
        deadline = loop.time() + timeout_s
        while not await is_ready():
            if ended is None or ended.done() or loop.time() > deadline:
                what = "ended" if ended is None or ended.done() else f"was not ready within {timeout_s:g} s"
                raise CommandFailed(f"{self._program.name} {what}:\n{_tail(self._program.log)}")
            await asyncio.sleep(POLL_S)


def baton_up(name: str, flags: Sequence[str], cores: Sequence[int], scratch: Path, steps: Path) -> Program:
    """`baton up` on `cores` alone; its decode worker appends its steps to `steps`."""
    command = [sys.executable, "-P", "-m", "baton.cli", "up", "--device", "cpu", *flags]
    command += ["--trace-file", str(scratch / f"{name}.jsonl")]
    environment = {**OUR_CODE, "BATON_STEP_FILE": str(steps)}
    return Program(name, tuple(command), tuple(cores), scratch / f"{name}.log", environment)


def floor_program(flags: Sequence[str], core: int, scratch: Path) -> Program:
    """The matrix products of a prefill worker, over and over, on one core."""
    command = (sys.executable, "-P", "-m", "baton.benchmarks.isolation.floor", *flags)
    return Program("floor", command, (core,), scratch / "floor.log", {**OUR_CODE, "OMP_NUM_THREADS": "1"})


def read_steps(path: Path) -> list[Step]:
    """The steps that a decode worker wrote so far, in order."""
    steps = []
    for line in path.read_text().splitlines() if path.exists() else ():
        started, ended, tokens = line.split()
        steps.append(Step(float(started), float(ended), int(tokens)))
    return steps


class ThreadTimes:
    """CPU time of each thread of a process, and how long it waited for a core (`/proc`, schedstat)."""

    def __init__(self, pid: int) -> None:
        self._tasks = Path(f"/proc/{pid}/task")
        self._looks: list[dict[str, tuple[int, int]]] = []

    def look(self) -> None:
        self._looks.append(self._read())

    def busiest(self) -> EngineTime | None:
        """Of the thread that computed most between the last two looks; None where the kernel does not count."""
        before, after = self._looks[-2:]
        spent = []
        for thread, (on_core, waiting) in after.items():
            core_before, waiting_before = before.get(thread, (0, 0))
            spent.append(EngineTime((on_core - core_before) / 1e9, (waiting - waiting_before) / 1e9))
        return max(spent, key=lambda time: time.on_core, default=None)

    def _read(self) -> dict[str, tuple[int, int]]:
        """Nanoseconds (on a core, waiting for one) by thread id."""
        found = {}
        for task in self._tasks.iterdir() if self._tasks.exists() else ():
            try:
                on_core, waiting, _ = (task / "schedstat").read_text().split()
            except (OSError, ValueError):
                continue  # a thread that has just ended, or a kernel without these counts
            found[task.name] = (int(on_core), int(waiting))
        return found


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-LOG_TAIL_BYTES:]


HOST = "127.0.0.1"
KV_GIB = "1"  # as `baton up` takes at most
PROBE_TIMEOUT_S = 1.0


def vllm_server(python: Path, model: Path, max_model_len: int, cores: Sequence[int], port: int, log: Path) -> Program:
    """One thread per core, bfloat16, no prefix cache (no prompt comes twice), the rest as vLLM has it."""
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", HOST, "--port", str(port), "--max-model-len", str(max_model_len)]
    command += ["--dtype", "bfloat16", "--no-enable-prefix-caching", "--served-model-name", model.name]
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": write_cores(cores),
        "VLLM_CPU_KVCACHE_SPACE": KV_GIB,
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    return Program("vLLM", tuple(command), tuple(cores), log, environment)


async def vllm_serves(port: int) -> bool:
    return await asyncio.to_thread(_serves, port)


def _serves(port: int) -> bool:
    try:
        with urlopen(f"http://{HOST}:{port}/health", timeout=PROBE_TIMEOUT_S) as response:
            return int(response.status) == 200
    except (URLError, OSError):
        return False
