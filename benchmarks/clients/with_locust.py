"""locust's soak: 16 users, for a minute or ten; no request fails, and the router's memory stays where it is."""

import csv
from pathlib import Path
from typing import Any

from benchmarks.clients.environments import program
from benchmarks.clients.run import Run

USERS = 16


def run_locust(run: Run) -> dict[str, Any]:
    """Raises: RuntimeError where a request failed."""
    file = Path(__file__).with_name("locustfile.py")
    command = [str(program(run.environments, "locust", "locust")), "--headless", "--host", run.url]
    command += ["--locustfile", str(file), "--users", str(USERS), "--spawn-rate", str(USERS)]
    command += ["--run-time", f"{run.seconds:g}s", "--csv", str(run.results / "out"), "--only-summary"]
    run.client(command, run.seconds + 60)
    with (run.results / "out_stats.csv").open() as lines:
        rows = {row["Name"]: row for row in csv.DictReader(lines)}
    total = rows["Aggregated"]
    failures = int(total["Failure Count"])
    figures = {
        "requests": int(total["Request Count"]),
        "failures": failures,
        "requests_per_s": round(float(total["Requests/s"]), 1),
        "p50_ms": int(total["50%"]),
        "p99_ms": int(total["99%"]),
    }
    if failures:
        raise RuntimeError(f"{figures}\n{(run.results / 'out_failures.csv').read_text()}")
    return figures
