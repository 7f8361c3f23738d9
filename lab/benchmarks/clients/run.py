"""A client of another project in a virtual environment of its own, from `requirements/NAME.txt`, and its service.

`baton up` runs for as long as the client does. The memory that each of its processes holds for itself, without the
shared pools of KV, is watched over time.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Self

from baton.process.registry.redis_server import free_port

REQUIREMENTS = Path(__file__).parent / "requirements"


def program(folder: Path, name: str, command: str) -> Path:
    """Path of a command of the client's; its environment in `folder` is made where there is none.

    Raises: CalledProcessError.
    """
    environment = folder / name
    marker = environment / "installed"
    if not marker.exists():
        print(f"installing {name} into {environment}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(environment)], check=True)
        pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python"), "install", "--no-compile"]
        requirements = ["--requirement", str(REQUIREMENTS / f"{name}.txt")]
        subprocess.run([*pip, "--quiet", "--disable-pip-version-check", *requirements], check=True)
        marker.touch()
    return environment / "bin" / command


@dataclass(frozen=True, slots=True)
class ClientRun:
    url: str  # of the service, without /v1
    model: str  # its name there
    model_folder: Path  # with tokenizer and weights
    environments: Path
    results: Path  # an empty folder
    seconds: float  # of load, where a client takes a time
    pids: Mapping[str, int] = field(default_factory=dict)  # of the service's processes; none where it runs elsewhere

    def client(self, command: list[str], timeout_s: float, **environment: str) -> str:
        """Run a client and return what it printed. Raises: CalledProcessError, TimeoutExpired."""
        done = subprocess.run(
            command,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false", **environment},
            cwd=self.results,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
        (self.results / "output.txt").write_text(done.stdout)
        if done.returncode:
            raise RuntimeError(f"{command[0]} ended with {done.returncode}:\n{done.stdout[-4000:]}")
        return done.stdout


def served_model(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer:
        models: dict[str, Any] = json.load(answer)
    name: str = models["data"][0]["id"]
    return name


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


_MIB = 1024  # /proc counts in KiB


def own_mib(pid: int, proc: Path = Path("/proc")) -> float | None:
    """Anonymous memory of a process; None where it is gone."""
    try:
        lines = (proc / str(pid) / "status").read_text().splitlines()
    except OSError:
        return None
    counted = next((line for line in lines if line.startswith("RssAnon:")), None)
    return float(counted.split()[1]) / _MIB if counted is not None else None


def children(pid: int, proc: Path = Path("/proc")) -> dict[str, int]:
    """Process ids below one, by the module that each runs; of two of a kind the second is `NAME 2`."""
    found: dict[str, int] = {}
    for entry in sorted((entry for entry in proc.iterdir() if entry.name.isdigit()), key=lambda each: int(each.name)):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            command = (entry / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if parent == pid:
            kind = (
                command[command.index("-m") + 1].removeprefix("baton.")
                if "-m" in command[:-1]
                else command[0].partition(" ")[0].rpartition("/")[2]
            )
            same = sum(name.partition(" ")[0] == kind for name in found)
            found[kind if not same else f"{kind} {same + 1}"] = int(entry.name)
    return found


@dataclass
class MemoryWatch:
    """Sampler of all processes' memory, `every_s`, inside the block."""

    pids: Mapping[str, int]
    every_s: float
    samples: dict[str, list[float]] = field(default_factory=dict)
    at_s: list[float] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, name="memory watch")
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        began_s = time.monotonic()
        while True:
            self.at_s.append(round(time.monotonic() - began_s, 1))
            for name, pid in self.pids.items():
                if (mib := own_mib(pid)) is not None:
                    self.samples.setdefault(name, []).append(round(mib, 1))
            if self._ended.wait(self.every_s):
                return


def growth_mib(samples: list[float]) -> float:
    """Return the growth from the second quarter to the last: the first fills what fills up once."""
    quarter = len(samples) // 4
    if not quarter:
        return 0.0
    return median(samples[-quarter:]) - median(samples[quarter : 2 * quarter])
