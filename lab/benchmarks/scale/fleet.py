"""Fleet for measurements: a real router, a real Redis, and thousands of simulated workers in a few processes."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from baton.client import AsyncAdminClient, BatonClientError
from baton.lab.benchmarks.router.streams import cpu_s
from baton.lab.benchmarks.scale.worker import HOST, NAMESPACE, role_of
from baton.lab.harness.processes import ONCE, Program, RunningProgram, our_program, serves, split_cores
from baton.process.registry.redis_server import free_ports, start_redis_server
from baton.process.registry.worker_record import WorkerRole

READY_S, POLL_S, STATUS_S = 300.0, 2.0, 30.0
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class FleetShape:
    """Workers of a fleet: every `prefill_every`-th is a prefill worker. `blocks`: cached blocks of each.

    `per_process`: maximum number of workers in one process.
    """

    workers: int
    prefill_every: int = 2
    blocks: int = 1024
    per_process: int = 255

    def count(self, role: WorkerRole) -> int:
        return sum(role_of(number, self.prefill_every) is role for number in range(self.workers))


@dataclass(frozen=True, slots=True)
class Used:
    """CPU time of the router and its helper processes, and its resident memory."""

    at_s: float
    cpu_s: float
    rss_bytes: int

    def cpu_share(self, later: "Used") -> float:
        """Return the CPU time until `later` as a fraction of one core's time."""
        return (later.cpu_s - self.cpu_s) / (later.at_s - self.at_s)


@dataclass(slots=True)
class Fleet:
    target: str
    admin_target: str
    http_target: str
    router: RunningProgram
    programs: list[Program]
    hosts: dict[int, RunningProgram] = field(default_factory=dict)  # running worker processes by number
    ready_s: float = 0.0  # time from the router's start until all workers were connected

    def used(self) -> Used:
        pid = self.router.pid
        status = Path(f"/proc/{pid}/status").read_text().split()
        rss_bytes = int(status[status.index("VmRSS:") + 1]) * 1024
        return Used(time.monotonic(), sum(map(cpu_s, (pid, *_children(pid)))), rss_bytes)

    async def connected(self) -> int:
        """Return the number of workers to which the router has links; 0 if it does not respond."""
        async with AsyncAdminClient(self.admin_target, timeout_s=STATUS_S, retry=ONCE) as admin:
            try:
                status = await admin.status()
            except BatonClientError:
                return 0
        return sum(worker.connected for worker in status.workers)

    async def start(self, number: int) -> None:
        """Start a worker process that is not running."""
        self.hosts[number] = await RunningProgram(self.programs[number]).__aenter__()

    async def kill(self, number: int) -> None:
        """End a worker process as SIGKILL does."""
        host = self.hosts.pop(number)
        os.kill(host.pid, signal.SIGKILL)
        await host.__aexit__(None, None, None)

    async def close(self) -> None:
        for host in self.hosts.values():
            os.kill(host.pid, signal.SIGKILL)  # 255 gRPC servers would take long to stop
        for host in self.hosts.values():
            await host.__aexit__(None, None, None)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return found


@asynccontextmanager
async def fleet(folder: Path, shape: FleetShape, *router_flags: object) -> AsyncIterator[Fleet]:
    """Run a fleet: the router on one core, everything else on the others. `folder` contains the checkpoint `tiny`.

    Raises: CommandFailed.
    """
    port, admin, http = free_ports(3)
    first, rest = split_cores()
    async with AsyncExitStack() as stack:
        redis = start_redis_server()
        stack.callback(redis.stop)
        ports = ("--host", HOST, "--port", port, "--admin-port", admin, "--http-port", http)
        members = ("--redis-url", redis.url, "--namespace", NAMESPACE, "--log-level", "error")
        router = our_program("router", folder, "baton.router", *ports, *members, *router_flags, cores=first)
        programs = list[Program]()
        for begin in range(0, shape.workers, shape.per_process):
            numbers = (begin, min(shape.per_process, shape.workers - begin))
            flags = (folder / "tiny", redis.url, *numbers, shape.prefill_every, shape.blocks)
            name = f"workers-{len(programs)}"
            programs.append(our_program(name, folder, "baton.lab.benchmarks.scale.worker", *flags, cores=rest))
        running = await stack.enter_async_context(RunningProgram(router))
        found = Fleet(f"{HOST}:{port}", f"{HOST}:{admin}", f"{HOST}:{http}", running, programs)
        stack.push_async_callback(found.close)
        began_s = time.monotonic()
        for number in range(len(programs)):
            await found.start(number)
        await until_connected(found, shape.workers)
        found.ready_s = time.monotonic() - began_s
        yield found


async def until_connected(fleet: Fleet, workers: int) -> None:
    """Wait until the router serves and has links to this number of workers.

    Raises: CommandFailed if a process exits first, or on timeout.
    """
    deadline_s = time.monotonic() + READY_S
    while not (await serves(fleet.target) and await fleet.connected() >= workers):
        for program in (fleet.router, *fleet.hosts.values()):
            program.check_runs()
        if time.monotonic() > deadline_s:
            had = f"had links to only {await fleet.connected()} of {workers} workers after {READY_S:g} s"
            raise fleet.router.failure(had)
        await asyncio.sleep(POLL_S)
