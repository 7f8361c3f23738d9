"""Service under test: Redis, routers and workers under the supervisor of `baton up`, each behind a proxy.

A process listens on 127.0.0.1 and advertises another loopback address with the same port, at which its proxy listens.
Processes are configured as without proxies.
"""

import asyncio
import math
import mmap
import os
import secrets
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TextIO

import grpc

from baton import child_environment
from baton.client import AsyncAdminClient, BatonClientError, ClusterStatus, RetryPolicy
from baton.lab.chaos.disk.counts import TierWatch
from baton.lab.chaos.faults import DISK
from baton.lab.chaos.proxy import Owners, Proxy
from baton.lab.chaos.rolling.checkout import command_of
from baton.lab.chaos.watch import Life, is_alive, life_of, state_of
from baton.launch.processes import Backoff, ChildProcess, LineWriter, ProcessSpec, Stage
from baton.launch.supervisor import Supervisor
from baton.process.registry.redis_server import NOISE, find_redis_server, free_port, free_ports, redis_command
from baton.protos import session_pb2, session_pb2_grpc

PAGE = struct.Struct("<qq")  # clock offset in seconds, and number of clock reads with an offset
BUILD_S = 30.0
HOST = "127.0.0.1"
POLL_S = 0.1
STATUS_S = 1.0
GRACE_S = 40.0
BACK_S = 0.2  # delay of every restart, without back-off, since faults cause all exits
SUPERVISION = partial(Backoff, longest_s=BACK_S, max_deaths=math.inf)
METRICS_S = 1.0
KV_MEMORY = "16MiB"
SMALL_KV_MEMORY = {"prefill": "4MiB", "decode": "8MiB"}  # 128 and 256 blocks: few, so that files are read
TIER_SIZE = "32MiB"  # several hundred blocks, so few that workers evict KV from files
MODEL_NAME = "tiny"
LOG_LINES = 5


class JumpingClock:
    """Wall clock that can jump, for all processes started with `environment`. Owns the page that the library reads."""

    def __init__(self, library: Path, page: Path) -> None:
        page.write_bytes(bytes(PAGE.size))
        with page.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), PAGE.size)
        self.environment: Mapping[str, str] = {"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(page)}

    def jump(self, seconds: int) -> None:
        """Set the offset of the wall clock in all processes, in seconds; 0: the true time."""
        self._page[:8] = struct.pack("<q", seconds)

    @property
    def wrong_reads(self) -> int:
        """Return the number of times that processes have read a clock with an offset."""
        return int(PAGE.unpack(self._page[: PAGE.size])[1])

    def close(self) -> None:
        self._page.close()


def find_compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def compile_library(source: Path, library: Path) -> bool:
    """Compile a library for LD_PRELOAD. Return False if no C compiler is installed, or if it fails."""
    compiler = find_compiler()
    if compiler is None:
        return False
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    return subprocess.run(command, capture_output=True, timeout=BUILD_S, check=False).returncode == 0


def make_wall_clock(folder: Path) -> JumpingClock | None:
    """Create the clock that can jump. Returns None if no C compiler is installed."""
    library = folder / "clock.so"
    if not compile_library(Path(__file__).with_name("clock.c"), library):
        return None
    return JumpingClock(library, folder / "clock.page")


@dataclass(frozen=True, slots=True)
class TierFolder:
    """Directory of KV files. With it, workers have pools so small that KV of prompts is loaded from files."""

    directory: Path
    environment: Mapping[str, str] = field(default_factory=dict)  # environment variables of the preloaded disk library


class NotWhole(Exception):
    """Error: the stack was not ready in time. The message names what is missing, with the last lines of its log."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Number of processes of each kind, in addition to one Redis. `shares_ports`: all routers listen on one gRPC port
    and one HTTP port; each is reached through a proxy of its own, behind which the kernel chooses a router.
    """

    routers: int = 2
    prefill: int = 2
    decode: int = 2
    shares_ports: bool = False

    @classmethod
    def with_routers(cls, count: int | None) -> "Layout":
        """Return the layout with `count` routers on one port; None: two routers with a port each."""
        return cls() if count is None else cls(count, shares_ports=True)


WHOLE = Layout()


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """Ports at which a process listens, and the host that it advertises."""

    name: str
    port: int
    advertised_host: str
    admin_port: int = 0  # only of routers
    http_port: int = 0  # only of routers: its own; 0: any free port

    @property
    def advertised(self) -> str:
        return f"{self.advertised_host}:{self.port}"

    @property
    def direct(self) -> str:
        """Address of the process itself, behind the proxy."""
        return f"{HOST}:{self.port}"

    @property
    def role(self) -> str:
        return self.name.partition("-")[0]


def unsound(
    redis: ProcessPlace,
    routers: Mapping[str, ClusterStatus | None],
    workers: Sequence[ProcessPlace],
    running: Sequence[str],
    tiers_off: Mapping[str, str],
) -> dict[str, str]:
    """Return what is wrong with each process, by name; processes that serve are left out. Pure.

    `routers`: status of each router, None if it does not answer. `running`: names of the running processes.
    `tiers_off`: for each worker that does not use KV files, `reads`, `writes` or both.
    """
    found = dict.fromkeys((redis.name, *routers, *(each.name for each in workers)), "is not running")
    found = {name: word for name, word in found.items() if name not in running}
    for router, status in routers.items():
        if router in found:
            continue
        if status is None:
            found[router] = "does not answer"
            continue
        if not status.ready:
            found[router] = status.detail or "is not ready"
        if not status.registry_connected:
            found.setdefault(redis.name, f"is not reached by {router}")
        there = {worker.worker_id for worker in status.workers if worker.connected and worker.load is not None}
        for worker in workers:
            if worker.name not in there:
                found.setdefault(worker.name, f"is not connected to {router}")
    for worker_name, ways in tiers_off.items():
        found.setdefault(DISK, f"is not used by {worker_name}: {ways}")
    return found


class ChaosStack:
    """Service under test, which runs from `start` to `stop`: processes and their proxies. `folder`: for logs."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        clock: JumpingClock | None,
        layout: Layout = WHOLE,
        worker_flags: Sequence[str] = (),
        records_steps: bool = False,
        tier: TierFolder | None = None,
    ) -> None:
        self._model = model
        self._tier = tier
        self.tiers = None if tier is None else TierWatch(self._metrics)
        self._folder = folder
        self._worker_flags = worker_flags
        self._records_steps = records_steps
        self._owners = Owners()
        self._admins: dict[str, AsyncAdminClient] = {}
        self._environment = child_environment() | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        preloaded = [each.environment for each in (clock, tier) if each is not None and each.environment]
        for environment in preloaded:
            self._environment |= environment
        if preloaded:
            self._environment["LD_PRELOAD"] = ":".join(each["LD_PRELOAD"] for each in preloaded)
        self._shared_ports = free_ports(2) if layout.shares_ports else None  # gRPC and HTTP
        self.redis = self._redis_place()
        roles = (("prefill", layout.prefill), ("decode", layout.decode))
        workers = [f"{role}-{number}" for role, count in roles for number in range(count)]
        self.workers = [self._worker_place(name, number) for number, name in enumerate(workers)]
        self.routers = [self._router_place(number) for number in range(layout.routers)]
        self.places = {place.name: place for place in (self.redis, *self.routers, *self.workers)}
        self.proxies = self._make_proxies()
        self._logs: list[TextIO] = []
        self._supervisor: Supervisor | None = None
        self.events: list[str] = []  # messages of the supervisor, for example about exits
        self.code: dict[str, Path] = {}  # by process: PYTHONPATH of the release that it uses at the next start

    async def start(self) -> None:
        """Start the stack. Raises: OSError, RedisServerError."""
        for proxy in self.proxies.values():
            await proxy.start()
        self._logs = [(self._folder / f"{name}.log").open("a") for name in self.places]
        writers = dict(zip(self.places, map(LineWriter, self._logs), strict=True))

        async def start_child(spec: ProcessSpec) -> ChildProcess:
            if spec.name in self.code:
                code = {"PYTHONPATH": str(self.code[spec.name])}
                command = command_of(self.code[spec.name], spec.command)
                spec = replace(spec, command=command, environment={**spec.environment, **code})
            return await self._start_child(spec, writers[spec.name])

        specs = [self._redis_spec(), *map(self._worker_spec, self.workers), *map(self._router_spec, self.routers)]
        self._supervisor = Supervisor(specs, start_child, self.events.append, backoff=SUPERVISION)
        self._supervisor.start()
        if self.tiers is not None:
            self.tiers.start()

    async def _start_child(self, spec: ProcessSpec, writer: LineWriter) -> ChildProcess:
        """Start the process of `spec`; hosted stacks override this. Raises: OSError."""
        return await ChildProcess.start(spec, writer, writer)

    def mark_ready(self) -> None:
        """Tell the supervisor to restart processes from now on, any number of times."""
        if self._supervisor is not None:
            self._supervisor.mark_ready()

    async def stop(self) -> None:
        if self.tiers is not None:
            await self.tiers.stop()
        if self._supervisor is not None:
            await self._supervisor.stop()
        for admin in self._admins.values():
            await admin.close()
        for proxy in self.proxies.values():
            await proxy.close()
        for log in self._logs:
            log.close()

    def pids(self) -> dict[str, int]:
        return self._supervisor.pids() if self._supervisor is not None else {}

    def life(self, name: str) -> Life | None:
        """Return the identity of the process that now runs under `name`; None if none does."""
        pid = self.pids().get(name)
        return None if pid is None else life_of(pid)

    def send(self, life: Life, number: signal.Signals) -> None:
        """Send a signal to the process if it still exists."""
        if is_alive(life):
            os.kill(life.pid, number)

    async def statuses(self) -> list[ClusterStatus | None]:
        """Return the cluster as each router sees it; None for a router that does not answer."""
        return list(await asyncio.gather(*map(self._status, self.routers)))

    async def unsound(self) -> dict[str, str]:
        """Return what is wrong with each process; empty if every router is ready and connected to every worker."""
        statuses = dict(zip((router.name for router in self.routers), await self.statuses(), strict=True))
        running = [name for name in self.places if self.life(name) is not None]
        tiers_off = {} if self.tiers is None else self.tiers.counts.off
        return unsound(self.redis, statuses, self.workers, running, tiers_off)

    async def wait_whole(self, within_s: float) -> float:
        """Wait until all processes serve; return the seconds it took. Raises: NotWhole."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while wrong := await self.unsound():
            if self._supervisor is not None and self._supervisor.failure.done():
                raise NotWhole(f"{self._supervisor.failure.exception()}{self._last_lines(wrong)}")
            if loop.time() - began_s > within_s:
                found = "; ".join(" ".join(each) for each in wrong.items())
                raise NotWhole(f"after {within_s:g} s: {found}{self._last_lines(wrong)}")
            await asyncio.sleep(POLL_S)
        return loop.time() - began_s

    def _last_lines(self, names: Iterable[str]) -> str:
        """Return the last lines of the logs of the processes, each with the process's name before it."""
        files = {name: self._folder / f"{name}.log" for name in names if name in self.places}
        lines = {name: file.read_text(errors="replace").splitlines()[-LOG_LINES:] for name, file in files.items()}
        return "".join(f"\n{name}: {line}" for name, last in lines.items() for line in last)

    async def _status(self, router: ProcessPlace) -> ClusterStatus | None:
        """Return the status of a router; None if it does not answer.

        Each router has one channel for the complete run. A router that SIGSTOP has stopped is not asked.
        """
        life = self.life(router.name)
        if life is None or state_of(life.pid) == "T":
            return None
        admin = self._admins.get(router.name)
        if admin is None:
            once = RetryPolicy(attempts=1)
            admin = self._admins[router.name] = AsyncAdminClient(
                f"{HOST}:{router.admin_port}", timeout_s=STATUS_S, retry=once
            )
        try:
            return await admin.status()
        except BatonClientError:
            return None

    async def _metrics(self) -> str:
        """Return the /metrics of the first router that answers; empty if none does."""
        for router in self.routers:
            life = self.life(router.name)
            if life is None or state_of(life.pid) == "T":
                continue
            try:
                async with asyncio.timeout(METRICS_S):
                    reader, writer = await asyncio.open_connection(HOST, router.http_port)
                    try:
                        writer.write(f"GET /metrics HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n".encode())
                        return (await reader.read()).decode()
                    finally:
                        writer.close()
            except (OSError, TimeoutError):
                continue
        return ""

    def _redis_place(self) -> ProcessPlace:
        return ProcessPlace("redis", free_port(), "127.0.1.1")

    def _worker_place(self, name: str, number: int) -> ProcessPlace:
        return ProcessPlace(name, free_port(), f"127.0.1.{10 + number}")

    def _router_place(self, number: int) -> ProcessPlace:
        http_port = 0 if self._tier is None else free_port()
        port = free_port() if self._shared_ports is None else self._shared_ports[0]
        return ProcessPlace(f"router-{number}", port, f"127.0.1.{20 + number}", free_port(), http_port)

    def steps(self, role: str) -> list[tuple[float, float]]:
        """Return start (monotonic) and duration, in seconds, of each recorded step of all workers of a role."""
        files = [self._step_file(place) for place in self.workers if place.role == role]
        lines = [line.split() for file in files if file.exists() for line in file.read_text().splitlines()]
        return [(float(began), float(ended) - float(began)) for began, ended, _ in lines]

    def _step_file(self, place: ProcessPlace) -> Path:
        return self._folder / f"{place.name}-steps.txt"

    def _make_proxies(self) -> dict[str, Proxy]:
        """Create one proxy per process; return them by process name."""
        return {name: self._proxy(place) for name, place in self.places.items()}

    def _proxy(self, place: ProcessPlace) -> Proxy:
        advertised = (place.advertised_host, place.port)
        return Proxy(advertised, (HOST, place.port), lambda port: self._owners.find(port, advertised, self.pids()))

    def _redis_spec(self) -> ProcessSpec:
        command = redis_command(find_redis_server(), self.redis.port)
        return ProcessSpec("redis", tuple(command), Stage.REDIS, GRACE_S, self._environment, noise=NOISE)

    def _worker_spec(self, place: ProcessPlace) -> ProcessSpec:
        arguments = ["--role", place.role, "--worker-id", place.name, "--port", place.port]
        arguments += ["--advertise", place.advertised_host, "--model", self._model, "--model-name", MODEL_NAME]
        arguments += ["--dtype", "float32"]
        if self._tier is None:
            arguments += ["--kv-memory", KV_MEMORY]
        else:
            arguments += ["--kv-memory", SMALL_KV_MEMORY[place.role], "--kv-tier-dir", self._tier.directory]
            arguments += ["--kv-tier-size", TIER_SIZE, "--kv-tier-load", "always"]
        arguments += ["--checksum-share", 1, "--kv-check-share", 1, *self._worker_flags]
        if self._records_steps:
            flag = "--step-file" if place.role == "decode" else "--chunk-file"
            arguments += [flag, self._step_file(place)]
        return self._spec(place, "elastic_worker", arguments, Stage.WORKER)

    def _router_spec(self, place: ProcessPlace) -> ProcessSpec:
        arguments: list[object] = ["--port", place.port, "--admin-port", place.admin_port]
        if self._shared_ports is None:
            arguments += ["--http-port", place.http_port]
        else:
            arguments += ["--share-ports", "--http-port", self._shared_ports[1], "--metrics-port", place.http_port]
        arguments += ["--planner", "off", "--trace-file", self._folder / f"{place.name}-trace.jsonl"]
        return self._spec(place, "router", arguments, Stage.ROUTER)

    def _spec(self, place: ProcessPlace, module: str, arguments: Sequence[object], stage: Stage) -> ProcessSpec:
        shared = ["--redis-url", f"redis://{self.redis.advertised}/0", "--namespace", f"chaos-{self.redis.port}"]
        command = (sys.executable, "-P", "-m", f"baton.{module}", *map(str, arguments), *shared)
        return ProcessSpec(place.name, command, stage, GRACE_S, self._environment)


PAGES_POLL_S = 0.002


class PageWatch:
    """Observes from `start` to `stop` which workers hold blocks, over a separate connection to each worker."""

    def __init__(self, workers: Sequence[ProcessPlace]) -> None:
        self._workers = workers
        self._tasks: list[asyncio.Task[None]] = []
        self._free_since_s: dict[str, float] = {}  # monotonic; only of workers whose last report has no held blocks

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._follow(worker)) for worker in self._workers]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def free_since(self, settle_s: float, within_s: float) -> dict[str, float | None]:
        """Return by worker the monotonic time since which it holds no block; None if it holds one after `within_s`.

        Returns as soon as no worker has held a block for `settle_s`.
        """
        until_s = time.monotonic() + within_s
        while time.monotonic() < until_s and not self._are_free_for(settle_s):  # noqa: ASYNC110 -- time alone ends it
            await asyncio.sleep(PAGES_POLL_S)
        return {worker.name: self._free_since_s.get(worker.name) for worker in self._workers}

    def _are_free_for(self, settle_s: float) -> bool:
        since_s = self._free_since_s.values()
        return len(since_s) == len(self._workers) and max(since_s) < time.monotonic() - settle_s

    async def _follow(self, worker: ProcessPlace) -> None:
        async with grpc.aio.insecure_channel(f"{HOST}:{worker.port}") as channel:
            call = session_pb2_grpc.SessionServiceStub(channel).Connect()
            await call.write(session_pb2.ConnectRequest(hello=session_pb2.Hello(router_id=secrets.token_bytes(16))))
            while isinstance(message := await call.read(), session_pb2.ConnectResponse):
                if message.WhichOneof("event") != "report":
                    continue
                if message.report.pages.held:
                    self._free_since_s.pop(worker.name, None)
                else:
                    self._free_since_s.setdefault(worker.name, time.monotonic())
