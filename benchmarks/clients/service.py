"""`baton up` for as long as the clients run."""

import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from baton.benchmarks.clients.memory import children
from baton.service.registry.redis_server import free_port

READY_S = 120.0
STOP_S = 60.0


@dataclass(frozen=True, slots=True)
class Service:
    url: str
    pids: Mapping[str, int] = field(default_factory=dict)


@contextmanager
def started(model: Path, flags: Sequence[str] = ()) -> Iterator[Service]:
    """A service with one prefill and one decode worker, in float32. Raises: RuntimeError."""
    http_port = free_port()
    command = [sys.executable, "-m", "baton.cli", "up", "--model", str(model), "--dtype", "float32", "--port", "0"]
    command += ["--admin-port", "0", "--http-port", str(http_port), "--kv-memory", "256MiB", *flags]
    running = subprocess.Popen(command, stdout=sys.stderr, stderr=sys.stderr)
    url = f"http://127.0.0.1:{http_port}"
    try:
        _wait(url, running)
        yield Service(url, children(running.pid))
    finally:
        running.send_signal(signal.SIGTERM)
        running.wait(STOP_S)


def _wait(url: str, running: "subprocess.Popen[bytes]") -> None:
    deadline_s = time.monotonic() + READY_S
    while running.poll() is None and time.monotonic() < deadline_s:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError("baton up did not become ready")
