"""Twenty seconds of locust's soak, against real workers; the ten minutes are a command (lab/benchmarks/clients)."""

from pathlib import Path

from baton.lab.benchmarks.clients.others import run_locust
from baton.lab.benchmarks.clients.run import ClientRun, served_model
from tests.e2e.stack import Stack

ROOT = Path(__file__).parents[2]
SECONDS = 20.0
MOST_GROWTH_MIB = 16.0  # of any process in half of that time; the command allows 24


def test_nothing_fails_while_users_come_and_go(stack: Stack, tmp_path: Path) -> None:
    pids = {name: process.pid for name, process in stack.processes.items()}
    clients = ROOT / ".cache" / "clients"

    figures = run_locust(ClientRun(stack.url, served_model(stack.url), Path(), clients, tmp_path, SECONDS, pids))

    assert figures["requests"] > 100
    assert set(figures["growth_mib"]) == set(pids)
    assert max(figures["growth_mib"].values()) < MOST_GROWTH_MIB
    assert figures["over_time"]["latency"]
