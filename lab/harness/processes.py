"""Processes that benchmarks start, pin to cores, wait for and stop."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Self, TextIO

import grpc

from baton import child_environment
from baton.client import AsyncAdminClient, AsyncBatonClient, BatonClientError, ClusterStatus, RetryPolicy
from baton.launch import CommandFailed
from baton.launch.processes import ChildProcess, LineWriter, ProcessSpec, Stage
from baton.launch.tiny_checkpoint import write_tiny_checkpoint
from baton.process.registry.redis_server import free_ports

HOST = "127.0.0.1"
GRACE_S, READY_S, POLL_S = 20.0, 120.0, 0.1
LOG_TAIL_BYTES = 2000
ONCE = RetryPolicy(attempts=1)
Ready = Callable[[], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class Program:
    """Process to start. `cores`: empty for any. `log`: file for its output."""

    name: str
    command: tuple[str, ...]
    cores: tuple[int, ...]
    log: Path
    environment: Mapping[str, str]


def our_program(
    name: str,
    folder: Path,
    module: str,
    *flags: object,
    cores: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
) -> Program:
    """Return the program that runs a module of Baton, by default with one thread. `folder`: folder of the log."""
    command = (sys.executable, "-P", "-m", module, *map(str, flags))
    added = {"OMP_NUM_THREADS": "1"} if environment is None else environment
    return Program(name, command, tuple(cores), folder / f"{name}.log", {**child_environment(), **added})


class RunningProgram:
    """Context manager that starts a process. On exit, it sends SIGTERM, waits up to GRACE_S and kills the group.

    The group is killed because a server that is stopped while it starts may leave children, such as vLLM's engine.
    """

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
        await asyncio.wait([self._ended], timeout=GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        await self._ended
        self._log.close()

    @property
    def pid(self) -> int:
        if self._child is None:
            raise RuntimeError(f"{self._program.name} was not started")
        return self._child.pid

    async def wait_until(self, is_ready: Ready, timeout_s: float = READY_S) -> None:
        """Wait until `is_ready`. Raises: CommandFailed if the process exits first, or on timeout."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not await is_ready():
            self.check_runs()
            if asyncio.get_running_loop().time() > deadline:
                raise self.failure(f"was not ready within {timeout_s:g} s")
            await asyncio.sleep(POLL_S)

    def check_runs(self) -> None:
        """Raises: CommandFailed if the process has exited."""
        if self._ended is None or self._ended.done():
            raise self.failure("exited")

    def failure(self, what: str) -> CommandFailed:
        """Return an error about this program with the end of its log."""
        tail = self._program.log.read_text(errors="replace")[-LOG_TAIL_BYTES:]
        return CommandFailed(f"{self._program.name} {what}:\n{tail}")


@contextmanager
def tiny_model() -> Iterator[Path]:
    """Yield a temporary folder with a checkpoint of random weights in its subfolder `tiny`."""
    with TemporaryDirectory(prefix="baton-bench-") as name:
        folder = Path(name)
        write_tiny_checkpoint(folder / "tiny")
        yield folder


@asynccontextmanager
async def running(programs: Sequence[Program], is_ready: Ready) -> AsyncIterator[RunningProgram]:
    """Start all programs and yield the last one, which is measured, once they are ready. Raises: CommandFailed."""
    async with AsyncExitStack() as stack:
        started = [await stack.enter_async_context(RunningProgram(program)) for program in programs]
        await started[-1].wait_until(is_ready)
        yield started[-1]


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """Addresses of a router, and the number of workers of its cluster."""

    target: str
    admin_target: str
    workers: int

    async def status(self) -> ClusterStatus | None:
        async with AsyncAdminClient(self.admin_target, timeout_s=2.0, retry=ONCE) as admin:
            try:
                return await admin.status()
            except BatonClientError:
                return None

    async def is_ready(self) -> bool:
        """Return whether the router is ready and connected to every worker."""
        status = await self.status()
        if status is None or not status.ready or status.detail:
            return False
        return sum(worker.connected for worker in status.workers) == self.workers


@dataclass(frozen=True, slots=True)
class HarnessWorker:
    """Worker to start; `name` begins with its role, as in `decode-0`."""

    name: str
    module: str
    flags: tuple[object, ...]


@asynccontextmanager
async def router_and_workers(
    folder: Path, workers: Sequence[HarnessWorker], router_flags: Sequence[object], prefix: str = ""
) -> AsyncIterator[RunningCluster]:
    """Start a router and workers as processes without Redis. `prefix`: start of log names. Raises: CommandFailed."""
    public, admin, *others = free_ports(2 + len(workers))
    cluster = RunningCluster(f"{HOST}:{public}", f"{HOST}:{admin}", len(workers))
    programs, members = [], []
    for worker, port in zip(workers, others, strict=True):
        members.append(f"{worker.name.partition('-')[0]}@{HOST}:{port}")
        named = ("--worker-id", worker.name, "--port", port)
        programs.append(our_program(prefix + worker.name, folder, worker.module, *named, *worker.flags))
    flags = (*ports_of(cluster), "--workers", ",".join(members), *router_flags)
    programs.append(our_program(f"{prefix}router", folder, "baton.router", "--http-port", 0, *flags))
    async with running(programs, cluster.is_ready):
        yield cluster


def ports_of(cluster: RunningCluster) -> tuple[str, ...]:
    port, admin_port = (each.rpartition(":")[2] for each in (cluster.target, cluster.admin_target))
    return ("--port", port, "--admin-port", admin_port)


async def serves(target: str) -> bool:
    """Return whether the router at `target` serves a model."""
    try:
        async with AsyncBatonClient(target, timeout_s=1.0) as baton:
            return bool(await baton.models())
    except BatonClientError:
        return False


async def listens(target: str) -> bool:
    """Return whether a gRPC server listens at `target`."""
    async with grpc.aio.insecure_channel(target) as channel:
        try:
            async with asyncio.timeout(1.0):
                await channel.channel_ready()
        except TimeoutError:
            return False
    return True


async def accepts(target: str) -> bool:
    """Return whether something accepts TCP connections at `target`."""
    host, _, port = target.rpartition(":")
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        return False
    writer.close()
    return True


def split_cores() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the core of the measured process and the cores of all others; they are the same on a single core."""
    cores = sorted(os.sched_getaffinity(0))
    return (cores[0],), tuple(cores[1:]) or (cores[0],)
