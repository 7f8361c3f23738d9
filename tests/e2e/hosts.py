"""Cluster with a host for each process; all addresses are IPv6, and hosts talk to each other by mutual TLS."""

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from baton.cli.keys import make_certificates
from baton.lab.harness.hosts.network import HostNetwork
from baton.lab.harness.hosts.reach import forwarded
from baton.process.registry.redis_server import find_redis_server, redis_command
from baton.process.security.tls import InternalTls
from tests.e2e.held import make_answers_holdable
from tests.e2e.stack import STOP_S, Stack, StackProcess
from tests.fixtures.tools import ROOT

ROUTER, PREFILL, DECODE, OTHER_DECODE = "router", "prefill-0", "decode-0", "decode-1"
WORKERS = (PREFILL, DECODE, OTHER_DECODE)
PORT, ADMIN_PORT, HTTP_PORT, WORKER_PORT, REDIS_PORT, REDIS_TLS_PORT = 50051, 50052, 8000, 50061, 6379, 6380
LOOPBACK = "127.0.0.1"


class Gates:
    """Ports on loopback that are forwarded to hosts, by a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._open = AsyncExitStack()
        self._thread.start()

    def open(self, first_process: int, address: str, port: int) -> int:
        entering = self._open.enter_async_context(forwarded(first_process, address, port))
        target = asyncio.run_coroutine_threadsafe(entering, self._loop).result(STOP_S)
        return int(target.rpartition(":")[2])

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._open.aclose(), self._loop).result(STOP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)
        self._loop.close()


@dataclass
class HostedStack(Stack):
    """Stack with a host of the same name for each process. `certificates`: folder."""

    network: HostNetwork | None = None
    certificates: Path = Path()

    @property
    def authority(self) -> Path:
        """Certificate authority of the public ports."""
        return self.certificates / "ca.pem"

    @property
    def internal_tls(self) -> InternalTls:
        names = ("internal-ca.pem", "internal.pem", "internal-key.pem")
        return InternalTls(*(self.certificates / name for name in names))

    @property
    def hosts(self) -> HostNetwork:
        assert self.network is not None
        return self.network

    def lose(self, name: str) -> None:
        """Power off a host; the others get no packet about it."""
        self.hosts.power_off(name)
        process = self.processes[name]
        assert process.popen is not None and process.popen.wait(STOP_S) == -signal.SIGKILL
        process.popen = None

    def bring_back(self, name: str) -> None:
        """Boot a host and start its process."""
        self.hosts.boot(name)
        self.processes[name].host = self.hosts.first_process(name)
        self.processes[name].start()


@contextmanager
def hosted_stack(folder: Path, model: Path) -> Iterator[HostedStack]:
    """Run a stack on hosts until the block is left; it is ready on entering."""
    certificates = folder / "certificates"
    with HostNetwork((ROUTER, *WORKERS), visible=(folder,)) as network:
        addresses = [network.address6(name) for name in network.names]
        make_certificates(certificates, addresses, days=1)
        stack = HostedStack(folder, 0, 0, network=network, certificates=certificates)
        with _redis(stack), _gates(stack):
            for name, command in _commands(stack, model).items():
                log, host = folder / f"{name}.log", network.first_process(name)
                stack.processes[name] = StackProcess(name, [*map(str, command)], log, host=host)
            make_answers_holdable(stack)
            try:
                stack.start()
                stack.wait_ready()
                yield stack
            finally:
                stack.stop()


@contextmanager
def _gates(stack: HostedStack) -> Iterator[None]:
    network, gates = stack.hosts, Gates()
    try:
        stack.port = gates.open(network.switch_process, network.address6(ROUTER), PORT)
        stack.http_port = gates.open(network.switch_process, network.address6(ROUTER), HTTP_PORT)
        stack.admin_port = gates.open(network.first_process(ROUTER), LOOPBACK, ADMIN_PORT)
        yield
    finally:
        gates.close()


@contextmanager
def _redis(stack: HostedStack) -> Iterator[None]:
    """Run Redis on the router's host: on loopback for the router, behind a TLS proxy for the others."""
    network, folder = stack.hosts, stack.certificates
    pair = (folder / "server.pem", folder / "server-key.pem", folder / "internal-ca.pem")
    front = (ROOT / "tests" / "fixtures" / "tls_front.py", network.address6(ROUTER), REDIS_TLS_PORT, REDIS_PORT, *pair)
    commands = (redis_command(find_redis_server(), REDIS_PORT), (sys.executable, "-I", *front))
    with (stack.folder / "redis.log").open("ab") as log:
        processes = [
            subprocess.Popen(network.command(ROUTER, each), stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            for each in commands
        ]
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
            process.wait(STOP_S)


def _commands(stack: HostedStack, model: Path) -> dict[str, list[object]]:
    """Return the commands by host. The last worker listens on all addresses and advertises a name."""
    network, folder = stack.hosts, stack.certificates
    files = f"ssl_ca_certs={folder}/ca.pem&ssl_certfile={folder}/internal.pem&ssl_keyfile={folder}/internal-key.pem"
    shared: list[object] = ["--redis-url", f"rediss://[{network.address6(ROUTER)}]:{REDIS_TLS_PORT}/0?{files}"]
    shared += ["--internal-tls-ca", folder / "internal-ca.pem", "--internal-tls-cert", folder / "internal.pem"]
    shared += ["--internal-tls-key", folder / "internal-key.pem"]
    commands: dict[str, list[object]] = {}
    for name in WORKERS:
        flags: list[object] = ["--worker-id", name, "--port", WORKER_PORT, "--model", model, "--model-name", model.name]
        flags += ["--dtype", "float32", "--kv-memory", "64MiB"]
        flags += ["--host", network.address6(name)]
        if name == OTHER_DECODE:
            flags[-1:] = ["::", "--advertise", network.name6(name)]
        commands[name] = [sys.executable, "-m", f"baton.{name.partition('-')[0]}_worker", *flags, *shared]
    flags = ["--host", network.address6(ROUTER), "--port", PORT, "--admin-port", ADMIN_PORT]
    flags += ["--http-host", network.address6(ROUTER), "--http-port", HTTP_PORT, "--insecure"]
    flags += ["--tls-cert", folder / "server.pem", "--tls-key", folder / "server-key.pem"]
    commands[ROUTER] = [sys.executable, "-m", "baton.router", *flags, *shared]
    return commands
