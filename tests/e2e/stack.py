"""A real stack for tests: Redis, prefill workers, decode workers and a router, each a process of its own."""

import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.client import AdminClient, BatonClientError, ClusterStatus
from baton.lab.chaos.rolling.checkout import command_of
from baton.process.registry.redis_server import RedisServer, start_redis_server
from tests.fixtures.preloaded import Forked

READY_S = 180.0
STOP_S = 30.0
IDLE_S = 15.0  # how soon pages are free on a quiet machine is measured by `baton chaos cancels`
POLL_S = 0.05
SILENCE_S = "10"  # until a router holds a worker for lost; far more than a busy machine keeps one waiting
KV_MEMORY = "32MiB"  # in place of the 256 without this flag: pages are all written at the start
FIRST_PORT, PORTS = 12_000, 4_000  # of each process that runs tests beside others; what is tested takes higher ones


@dataclass
class StackProcess:
    """One process with its log, which is what one reads when a test fails."""

    name: str
    command: list[str]
    log: Path
    popen: subprocess.Popen[bytes] | Forked | None = None
    is_forked: bool = True  # else the command is started as it is, with seconds of imports
    code: Path | None = None  # PYTHONPATH of another release, which is started as it is; None: this tree
    host: int | None = None  # the first process of the host that it runs on; None: this machine

    @property
    def pid(self) -> int:
        assert self.popen is not None, f"{self.name} was not started"
        return self.popen.pid

    def start(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = list(self.command)
        if self.code is not None:
            environment["PYTHONPATH"] = str(self.code)
            command = list(command_of(self.code, self.command))
        elif self.is_forked:
            _, _, module, *arguments = self.command
            self.popen = Forked(module, arguments, self.log, environment, self.host)
            return
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9, and the proof that it is gone. It may then be started again, or not."""
        assert self.popen is not None
        self.popen.kill()
        self.popen.wait(STOP_S)
        self.popen = None

    @property
    def runs(self) -> bool:
        return self.popen is not None and self.popen.poll() is None

    def terminate(self) -> None:
        """SIGTERM, where it runs."""
        if self.popen is not None and self.runs:
            self.popen.terminate()

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        self.terminate()
        return self.ended()

    def ended(self) -> int:
        """The exit code, after SIGTERM; a process that does not drain in time fails the test."""
        if self.popen is None:
            return 0
        try:
            return self.popen.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
            raise AssertionError(f"{self.name} did not stop in {STOP_S:g} s:\n{self.text()[-3000:]}") from None

    def text(self) -> str:
        return self.log.read_text(errors="replace")


@dataclass
class Stack:
    """Processes by name: `prefill-0`, …, `decode-0`, …, `router`. Redis is `redis`."""

    folder: Path
    port: int
    admin_port: int
    processes: dict[str, StackProcess] = field(default_factory=dict)
    redis: RedisServer | None = None
    http_port: int = 0  # 0: its router speaks gRPC alone
    admin_key: str | None = None  # where the router has API keys

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def trace_file(self) -> Path:
        return self.folder / "trace.jsonl"

    @property
    def traces(self) -> str:
        """What is written of them so far, in whole lines; the first comes a while after its request."""
        text = self.trace_file.read_text() if self.trace_file.exists() else ""
        return text[: text.rfind("\n") + 1]

    def spans(self) -> list[dict[str, Any]]:
        """Those in `traces`."""
        return [json.loads(line) for line in self.traces.splitlines()]

    def start(self, names: Sequence[str] | None = None) -> None:
        for name in self.processes if names is None else names:
            self.processes[name].start()

    def status(self) -> ClusterStatus:
        with AdminClient(f"127.0.0.1:{self.admin_port}", timeout_s=20.0, api_key=self.admin_key) as admin:
            return admin.status()

    def add_router(self, name: str) -> "Stack":
        """One more router of this cluster, to be started with the rest; returns it as clients see it."""
        promised = {int(word) for each in self.processes.values() for word in each.command if word.isdigit()}
        beside = Stack(self.folder, *free_ports(2, promised), processes=self.processes, redis=self.redis)
        command = list(self.processes["router"].command)
        for flag, value in (("--port", beside.port), ("--admin-port", beside.admin_port), ("--http-port", 0)):
            command[command.index(flag) + 1] = str(value)
        self.processes[name] = StackProcess(name, command, self.folder / f"{name}.log")
        return beside

    def wait_ready(self, workers: int | None = None) -> None:
        """Until the canary went all ways there are and so many workers have reported (default: all there are)."""
        wanted = sum(not name.startswith("router") for name in self.processes) if workers is None else workers

        def ready() -> bool:
            try:
                status = self.status()
            except BatonClientError:
                return False
            there = sum(worker.connected and worker.load is not None for worker in status.workers)
            return status.ready and not status.detail and there == wanted

        self.wait_for(ready, READY_S, "readiness")

    def wait_idle(self, within_s: float = IDLE_S) -> None:
        """Until no worker holds a page. The counts come with each worker's report."""

        def idle() -> bool:
            workers = self.status().workers
            return all(w.load is not None and w.load.pages.held == 0 for w in workers if w.connected)

        self.wait_for(idle, within_s, "all pages free")

    def wait_without_requests(self) -> None:
        """Until the router has nothing under way; it learns of clients that are gone a moment later than they are."""

        def empty() -> bool:
            status = self.status()
            return not status.active_requests and not any(each.in_flight_requests for each in status.workers)

        self.wait_for(empty, IDLE_S, "end of all requests")

    def kill_the_answering(self) -> str:
        """kill -9 of the only decode worker that has a request; all of them stand still while the router is asked."""
        decode = {name: each for name, each in self.processes.items() if name.startswith("decode") and each.runs}
        for process in decode.values():
            process.signal(signal.SIGSTOP)
        try:
            busy = [each.worker_id for each in self.status().workers if each.in_flight_requests]
            [name] = [each for each in busy if each in decode]
            decode[name].kill()
        finally:
            for process in decode.values():
                if process.runs:
                    process.signal(signal.SIGCONT)
        return name

    def replace_module(self, module: str, other: str) -> None:
        """Of all processes that run it."""
        for process in self.processes.values():
            process.command = [other if word == module else word for word in process.command]

    def wait_for(self, condition: Callable[[], bool], within_s: float, what: str) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"no {what} within {within_s:g} s\n{self.logs()}")
            time.sleep(POLL_S)  # a poll between two looks, bounded above

    def logs(self) -> str:
        return "\n".join(f"--- {p.name}\n{p.text()[-3000:]}" for p in self.processes.values() if p.log.exists())

    def stop(self) -> None:
        """Stops everything, the router first, and checks that each process ended well and logged no traceback."""
        codes = {name: self.processes[name].stop() for name in self.processes if name == "router"}
        for process in self.processes.values():
            process.terminate()  # all at once: each takes a second to end
        codes |= {name: process.ended() for name, process in self.processes.items()}
        if self.redis is not None:
            self.redis.stop()
        assert set(codes.values()) <= {0}, f"exit codes {codes}\n{self.logs()}"
        assert not re.search(r"^Traceback", self.logs(), re.MULTILINE), self.logs()


def make_stack(
    folder: Path,
    model: Path,
    prefill: int = 1,
    decode: int = 1,
    transports: Mapping[str, str] | None = None,
    worker_flags: Sequence[str] = (),
    with_redis: bool = True,
    router_flags: Sequence[str] = (),
    elastic: bool = False,
) -> Stack:
    """Lays out a stack without starting its processes; Redis runs already if wanted.

    `transports` says by worker what `--transport` is; for the others it is auto. `prefill` 0 is a colocated service.
    `elastic`: workers can change their roles.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ports = iter(free_ports(4 + prefill + decode))
    stack = Stack(folder, next(ports), next(ports), http_port=next(ports))
    registry: list[str] = []
    if with_redis:
        stack.redis = start_redis_server(next(ports))
        registry = ["--redis-url", stack.redis.url]
    members: list[str] = []
    for role, count in (("prefill", prefill), ("decode", decode)):
        for index in range(count):
            name, port = f"{role}-{index}", next(ports)
            module = ["baton.elastic_worker", "--role", role] if elastic else [f"baton.{role}_worker"]
            command = [sys.executable, "-m", *module, "--worker-id", name, "--port", str(port), *registry]
            command += ["--model", str(model), "--model-name", model.name, "--kv-memory", KV_MEMORY, *worker_flags]
            command += ["--transport", (transports or {}).get(name, "auto")]
            stack.processes[name] = StackProcess(name, command, folder / f"{name}.log")
            members.append(f"{role}@127.0.0.1:{port}")
    command = [sys.executable, "-m", "baton.router", "--port", str(stack.port), "--admin-port", str(stack.admin_port)]
    command += ["--http-port", str(stack.http_port)]
    command += registry or ["--workers", ",".join(members)]
    command += ["--trace-file", str(stack.trace_file), *_patient(router_flags)]
    stack.processes["router"] = StackProcess("router", command, folder / "router.log")
    return stack


def _patient(router_flags: Sequence[str]) -> list[str]:
    """Without this, workers of a busy machine would be held for lost in tests that are not about that."""
    told = "--session-silence-s" in router_flags
    return [*router_flags, *([] if told else ["--session-silence-s", SILENCE_S])]


def make_router(folder: Path, stack: Stack, workers: Sequence[str], router_flags: Sequence[str] = ()) -> Stack:
    """One more router, which knows nothing but the workers of those names, of a stack that runs."""
    folder.mkdir(parents=True, exist_ok=True)
    beside = Stack(folder, *free_ports(2))
    commands = {name: stack.processes[name].command for name in workers}
    members = (
        f"{name.partition('-')[0]}@127.0.0.1:{command[command.index('--port') + 1]}"
        for name, command in commands.items()
    )
    command = [sys.executable, "-m", "baton.router", "--port", str(beside.port), "--admin-port", str(beside.admin_port)]
    command += [
        "--http-port",
        "0",
        "--workers",
        ",".join(members),
        "--trace-file",
        str(beside.trace_file),
        *_patient(router_flags),
    ]
    beside.processes["router"] = StackProcess("router", command, folder / "router.log")
    return beside


def free_ports(count: int, promised: Set[int] = frozenset()) -> list[int]:
    """That many different ones, and none of `promised`, which are of processes that have not bound them yet."""
    place = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = FIRST_PORT + place * PORTS
    ports = (port for port in random.Random().sample(range(first, first + PORTS), PORTS) if port not in promised)
    return list(itertools.islice(filter(is_free, ports), count))


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
