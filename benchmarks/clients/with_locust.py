"""locust's soak: 16 users, for ten minutes; no request fails, answers stay as fast, no process grows."""

import csv
from pathlib import Path
from typing import Any

from baton.benchmarks.clients.run import MemoryWatch, Run, growth_mib, program

USERS = 16
SAMPLES = 60  # of memory and latency, over the whole time
MOST_GROWTH_MIB = 24.0
"""From the second quarter of the time to the last, of any process: allocators breathe."""


def run_locust(run: Run) -> dict[str, Any]:
    """Raises: RuntimeError where a request failed, or a process grew."""
    file = Path(__file__).with_name("locustfile.py")
    command = [str(program(run.environments, "locust", "locust")), "--headless", "--host", run.url]
    command += ["--locustfile", str(file), "--users", str(USERS), "--spawn-rate", str(USERS)]
    command += ["--run-time", f"{run.seconds:g}s", "--csv", str(run.results / "out"), "--csv-full-history"]
    with MemoryWatch(run.pids, run.seconds / SAMPLES) as watch:
        run.client([*command, "--only-summary"], run.seconds + 60)
    rows = {row["Name"]: row for row in _rows(run.results / "out_stats.csv")}
    total = rows["Aggregated"]
    growth = {name: round(growth_mib(samples), 1) for name, samples in watch.samples.items()}
    figures: dict[str, Any] = {
        "users": USERS,
        "seconds": run.seconds,
        "requests": int(total["Request Count"]),
        "failures": int(total["Failure Count"]),
        "requests_per_s": round(float(total["Requests/s"]), 1),
        "p50_ms": int(total["50%"]),
        "p99_ms": int(total["99%"]),
        "growth_mib": growth,
        "over_time": {"at_s": watch.at_s, "own_mib": watch.samples, "latency": _history(run.results)},
    }
    if figures["failures"]:
        raise RuntimeError(f"{figures}\n{(run.results / 'out_failures.csv').read_text()}")
    if max(growth.values(), default=0.0) > MOST_GROWTH_MIB:
        raise RuntimeError(f"a process grew: {figures}")
    return figures


def _history(folder: Path) -> list[dict[str, float]]:
    """Of the ten seconds before each of at most SAMPLES moments, all routes together."""
    rows = [
        row for row in _rows(folder / "out_stats_history.csv") if row["Name"] == "Aggregated" and row["50%"] != "N/A"
    ]
    if not rows:
        return []
    began_s = int(rows[0]["Timestamp"])
    return [
        {
            "at_s": int(row["Timestamp"]) - began_s,
            "requests_per_s": round(float(row["Requests/s"]), 1),
            "p50_ms": int(row["50%"]),
            "p99_ms": int(row["99%"]),
            "failures": int(row["Total Failure Count"]),
        }
        for row in rows[:: max(1, len(rows) // SAMPLES)]
    ]


def _rows(file: Path) -> list[dict[str, str]]:
    with file.open() as lines:
        return list(csv.DictReader(lines))
