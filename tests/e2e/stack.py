"""Real stack for tests: Redis, prefill workers, decode workers and routers, each in its own process."""

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
IDLE_S = 15.0  # generous for busy machines; `baton chaos cancels` measures how soon pages are free
POLL_S = 0.05
SILENCE_S = "10"  # after which a router takes a worker for lost; a busy machine may delay messages by seconds
TTFT_SLO_MS = "86400000"  # on a busy machine, a shorter one would let decode workers compute prompts
KV_MEMORY = "32MiB"  # instead of the default 256 MiB, which takes longer to write at start
FIRST_PORT, PORTS = 12_000, 2_000  # range of each xdist worker; those of four are below the ports of `baton up`


@dataclass
class StackProcess:
    """Process of a stack, with its log."""

    name: str
    command: list[str]
    log: Path
    popen: subprocess.Popen[bytes] | Forked | None = None
    is_forked: bool = True  # from a process that has imported everything; False starts the command itself
    code: Path | None = None  # PYTHONPATH of another release, which is not forked; None: this tree
    host: int | None = None  # PID of the first process of the host that it runs on; None: this machine

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
        """Kill it with SIGKILL and wait until it is gone; it can be started again."""
        assert self.popen is not None
        self.popen.kill()
        self.popen.wait(STOP_S)
        self.popen = None

    @property
    def runs(self) -> bool:
        return self.popen is not None and self.popen.poll() is None

    def terminate(self) -> None:
        """Send SIGTERM if it is running."""
        if self.popen is not None and self.runs:
            self.popen.terminate()

    def stop(self) -> int:
        """Send SIGTERM, wait, and return the exit code."""
        self.terminate()
        return self.ended()

    def ended(self) -> int:
        """Wait for the end after SIGTERM and return the exit code; a process that takes too long fails the test."""
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
    """Processes by name: `prefill-0`, …, `decode-0`, …, `router`."""

    folder: Path
    port: int
    admin_port: int
    processes: dict[str, StackProcess] = field(default_factory=dict)
    redis: RedisServer | None = None
    http_port: int = 0  # 0: no HTTP
    admin_key: str | None = None  # if the router has API keys

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
        """The complete lines that have been written to the trace file, some time after their requests."""
        text = self.trace_file.read_text() if self.trace_file.exists() else ""
        return text[: text.rfind("\n") + 1]

    def spans(self) -> list[dict[str, Any]]:
        """Parse the spans in `traces`."""
        return [json.loads(line) for line in self.traces.splitlines()]

    def start(self, names: Sequence[str] | None = None) -> None:
        for name in self.processes if names is None else names:
            self.processes[name].start()

    def status(self) -> ClusterStatus:
        with AdminClient(f"127.0.0.1:{self.admin_port}", timeout_s=20.0, api_key=self.admin_key) as admin:
            return admin.status()

    def add_router(self, name: str) -> "Stack":
        """Add a router to this cluster, started with the other processes; return a stack that addresses it."""
        beside = Stack(self.folder, *free_ports(2), processes=self.processes, redis=self.redis)
        command = list(self.processes["router"].command)
        for flag, value in (("--port", beside.port), ("--admin-port", beside.admin_port), ("--http-port", 0)):
            command[command.index(flag) + 1] = str(value)
        self.processes[name] = StackProcess(name, command, self.folder / f"{name}.log")
        return beside

    def share_ports(self, routers: int) -> "list[Stack]":
        """Replace the router, which is not started yet, by routers that share its ports.

        Return a stack for each that addresses its own admin port and its own HTTP port.
        """
        command = [*self.processes["router"].command, "--share-ports", "--metrics-port", "0"]
        own = iter(free_ports(2 * routers))
        stacks = []
        for name in ("router", *(f"router-{number}" for number in range(1, routers))):
            each = Stack(self.folder, self.port, next(own), self.processes, self.redis, next(own))
            own_command = list(command)
            for flag, value in (("--admin-port", each.admin_port), ("--metrics-port", each.http_port)):
                own_command[own_command.index(flag) + 1] = str(value)
            self.processes[name] = StackProcess(name, own_command, self.folder / f"{name}.log")
            stacks.append(each)
        self.admin_port = stacks[0].admin_port
        return stacks

    def wait_ready(self, workers: int | None = None) -> None:
        """Wait until the router is ready and that many workers, by default all, are connected and have reported."""
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
        """Wait until no worker holds a KV page, by their reports."""

        def idle() -> bool:
            workers = self.status().workers
            return all(w.load is not None and w.load.pages.held == 0 for w in workers if w.connected)

        self.wait_for(idle, within_s, "all pages free")

    def wait_without_requests(self) -> None:
        """Wait until the router has no requests; it notices a moment later that a client has disconnected."""

        def empty() -> bool:
            status = self.status()
            return not status.active_requests and not any(each.in_flight_requests for each in status.workers)

        self.wait_for(empty, IDLE_S, "end of all requests")

    def kill_the_answering(self) -> str:
        """Kill the only decode worker that has a request, and return its name.

        All decode workers are stopped while the router is asked, so that the request cannot end meanwhile.
        """
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
        """Run another module instead, in all processes that run `module`."""
        for process in self.processes.values():
            process.command = [other if word == module else word for word in process.command]

    def wait_for(self, condition: Callable[[], bool], within_s: float, what: str) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"no {what} within {within_s:g} s\n{self.logs()}")
            time.sleep(POLL_S)

    def logs(self) -> str:
        return "\n".join(f"--- {p.name}\n{p.text()[-3000:]}" for p in self.processes.values() if p.log.exists())

    def stop(self) -> None:
        """Stop everything, the router first, and check that each process exited with 0 and logged no traceback."""
        codes = {name: self.processes[name].stop() for name in self.processes if name == "router"}
        for process in self.processes.values():
            process.terminate()  # all at once, since each takes a second to end
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
    """Create a stack whose processes are not started; only Redis runs already.

    `transports`: `--transport` by worker; default auto. `prefill`: 0 for decode workers that compute prompts too.
    `elastic`: workers that can change their roles.
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
    """Add settings for a busy machine, whose workers may be slow to answer, unless they are given."""
    defaults = {"--session-silence-s": SILENCE_S, "--ttft-slo-ms": TTFT_SLO_MS}
    return [*router_flags, *(part for flag in defaults.keys() - set(router_flags) for part in (flag, defaults[flag]))]


def make_router(folder: Path, stack: Stack, workers: Sequence[str], router_flags: Sequence[str] = ()) -> Stack:
    """Create a router without Redis for some workers of a running stack."""
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
    """Find unused ports. `promised`: ports to avoid, since processes are about to bind them."""
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
