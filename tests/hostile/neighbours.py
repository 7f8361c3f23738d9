"""Measures how much a hostile client slows down another client, on a real 1P+1D service:

    .venv/bin/python -m tests.hostile.neighbours [--seconds 4] [--rounds 3] [S1 S2 ...]

The other client, the neighbour, streams greedy answers. Each round has a quiet window and a window for each attack,
which runs in its own process at low priority. Prints the p99 of the time between the neighbour's tokens in both, and
their ratio, as medians over the rounds. `floor` is a process that only uses CPU time, as a baseline. Exits with 1 if an
attack was not refused, the neighbour's text changed, a process died or its resident memory grew by 64 MiB or more.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

import httpx2

from baton.lab.chaos.watch import children_of
from baton.launch.paths import ROOT
from tests.e2e.stack import free_ports
from tests.hostile.attacks import ATTACKS, FLOOR, Target

READY_S, STOP_S, ATTACK_S = 120.0, 60.0, 90.0
MEMORY_BYTES = 64 << 20
WARM_UP_TOKENS = 300
MODEL = ROOT / "models" / "tableqa"
LOOP = (
    "{% if messages[-1].content == 'for ever' %}"
    "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}{% endif %}"
)
BODY = {"prompt": "Once", "max_tokens": 3900, "temperature": 0, "ignore_eos": True, "stream": True}


@dataclass
class Neighbour:
    """Client that streams one answer after another, in a thread."""

    url: str
    times_s: list[float] = field(default_factory=list)
    answers: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        with httpx2.Client(base_url=self.url, trust_env=False, timeout=60.0) as client:
            while not self.stopped.is_set():
                with client.stream("POST", "/v1/completions", json=BODY) as response:
                    text = self._read(response)
                if text is not None:
                    self.answers.add(text)

    def _read(self, response: httpx2.Response) -> str | None:
        """Read an answer and return its text; None if it was not complete."""
        if response.status_code != 200:
            self.problems.append(f"status {response.status_code}")
            return None
        pieces = []
        self.times_s.append(float("nan"))  # no gap between answers
        for line in response.iter_lines():
            if self.stopped.is_set():
                return None
            if line == "data: [DONE]":
                return "".join(pieces)
            if line.startswith("data: "):
                self.times_s.append(time.monotonic())
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    self.problems.append(event["error"]["message"])
                    return None
                pieces.append(event["choices"][0]["text"])
        self.problems.append("a stream ended without [DONE]")
        return None

    def p99_ms(self, since: int) -> float:
        times = self.times_s[since:]
        gaps = sorted(gap for before, now in pairwise(times) if (gap := now - before) == gap)
        return gaps[len(gaps) * 99 // 100] * 1e3 if gaps else float("nan")


@contextmanager
def service(folder: Path) -> Iterator[tuple[int, Target]]:
    """Run `baton up`; yield its PID, and the target for attacks."""
    model = folder / "tableqa"
    shutil.copytree(MODEL, model)
    template = model / "chat_template.jinja"
    template.write_text(LOOP + template.read_text())
    port, admin_port, http_port = free_ports(3)
    ports = ("--port", port, "--admin-port", admin_port, "--http-port", http_port)
    command = [sys.executable, "-P", "-m", "baton.cli", "up", "--model", model, *ports, "--kv-memory", "256MiB"]
    log = folder / "up.log"
    with log.open("wb") as output:
        up = subprocess.Popen([*map(str, command)], cwd=ROOT, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + READY_S
        while "ready in" not in log.read_text():
            assert up.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.1)
        environments = [environment_of(pid) for pid in children_of(up.pid)]
        known = {name: value for each in environments for name, value in each.items()}
        workers = [int(line.rpartition(":")[2]) for line in log.read_text().splitlines() if " serves " in line]
        secret, redis_url = known["BATON_SECRET"], known["BATON_REDIS_URL"]
        yield up.pid, Target(port, http_port, admin_port, tuple(workers), secret, redis_url, 0.0)
    finally:
        up.terminate()
        up.wait(STOP_S)


def environment_of(pid: int) -> dict[str, str]:
    parts = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(part.split("=", 1) for part in parts if "=" in part)


def servers(up: int) -> dict[int, str]:
    """Command lines of router, workers and Redis, by pid: helper processes may be killed."""
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ") for pid in children_of(up)}
    return {pid: line for pid, line in lines.items() if any(name in line for name in SERVERS)}


SERVERS = ("baton.router", "baton.elastic_worker", "redis-server", "valkey-server")


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def attack(name: str, target: Target) -> str:
    """What went wrong, or nothing."""
    script = [sys.executable, "-P", "-m", "tests.hostile.attacks"]
    command = ["nice", "-n", "10", *script, name, json.dumps(asdict(target))]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=ATTACK_S)
    return done.stderr.strip().rpartition("\n")[2] if done.returncode else ""


def measure(names: list[str], seconds: float, rounds: int) -> int:
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    problems = []
    with tempfile.TemporaryDirectory() as folder, service(Path(folder)) as (up, target):
        neighbour = Neighbour(target.url)
        reading = threading.Thread(target=neighbour.run, daemon=True)
        reading.start()
        while len(neighbour.times_s) < WARM_UP_TOKENS:
            time.sleep(0.1)
        before = servers(up)
        memory = {pid: resident_bytes(pid) for pid in before}
        for _ in range(rounds):
            for name in names:
                since = len(neighbour.times_s)
                time.sleep(seconds)
                quiet_ms, since = neighbour.p99_ms(since), len(neighbour.times_s)
                wrong = attack(name, Target(**{**asdict(target), "seconds": seconds}))
                found[name].append((quiet_ms, neighbour.p99_ms(since)))
                ended = [line for pid, line in before.items() if pid not in servers(up)]
                problems += [f"{name}: {each}" for each in (wrong, *ended) if each]
                before = servers(up)
        grown = {line: resident_bytes(pid) - memory[pid] for pid, line in before.items() if pid in memory}
        problems += [f"{line} grew by {size >> 20} MiB" for line, size in grown.items() if size >= MEMORY_BYTES]
        neighbour.stopped.set()
        reading.join(STOP_S)
        if len(neighbour.answers) > 1:
            problems.append("the neighbour's answer changed")
        problems += neighbour.problems
    floor = statistics.median(beside for _, beside in found[FLOOR]) if FLOOR in found else float("nan")
    for name, pairs in found.items():
        ratios = [beside / quiet for quiet, beside in pairs]
        quiet_ms, beside_ms = (statistics.median(each) for each in zip(*pairs, strict=True))
        print(f"{name:<4} p99 between tokens {quiet_ms:6.1f} ms quiet, {beside_ms:6.1f} ms beside it; ratio", end=" ")
        print(
            f"{statistics.median(ratios):.2f} (worst of {rounds}: {max(ratios):.2f}), to floor {beside_ms / floor:.2f}"
        )
    print(*(f"problem: {each}" for each in problems), sep="\n")
    return 1 if problems else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"attacks: {', '.join(ATTACKS)}; default: all")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each window")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    return measure(options.names or list(ATTACKS), options.seconds, options.rounds)


if __name__ == "__main__":
    sys.exit(main())
