"""A real Prometheus scrapes a stack with a little load: all panels have data, and latencies link to traces."""

import asyncio
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from baton.cli.keys import append_key
from baton.client import AsyncBatonClient, BatonClientError, RetryPolicy
from baton.lab.dashboards.__main__ import BOARDS, RULES
from baton.lab.dashboards.dashboards import NEEDS_A_FAILURE
from baton.lab.dashboards.promql import WINDOW
from baton.process.security.api_keys import UNLIMITED, KeyLimits
from tests.e2e.conftest import run
from tests.e2e.stack import Stack, make_stack
from tests.fixtures.prometheus import Prometheus, running_prometheus

WAIT_S = 45.0
POLL_S = 0.2
PROMPT = list(range(2, 98))  # three blocks
LIMITS = KeyLimits(requests_per_minute=600, tokens_per_minute=5_000)


@dataclass(frozen=True)
class Watched:
    stack: Stack
    prometheus: Prometheus
    keys: dict[str, str]


@pytest.fixture(scope="module")
def watched(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """1P+1D with API keys and a disk tier, scraped with an administrator's key."""
    folder = tmp_path_factory.mktemp("watched")
    file = folder / "keys"
    keys = {"alice": append_key(file, "alice", LIMITS, is_admin=False)}
    keys["boss"] = append_key(file, "boss", UNLIMITED, is_admin=True)
    flags = ["--api-keys", str(file), "--local-prefill-tokens", "0"]
    worker_flags = ["--checksum-share", "1", "--kv-tier-dir", str(folder / "tier"), "--kv-tier-size", "64MiB"]
    stack = make_stack(folder / "stack", tiny_llama, worker_flags=worker_flags, router_flags=flags)
    stack.admin_key = keys["boss"]
    (folder / "admin-key").write_text(keys["boss"])
    credentials = {"credentials_file": str(folder / "admin-key")}
    target = stack.url.removeprefix("http://")
    with running_prometheus(folder / "prometheus", target, RULES, credentials) as prometheus:
        for running in run(stack):
            yield Watched(running, prometheus, keys)


async def load(watched: Watched, prompt_of_all: list[int]) -> None:
    """Send a few requests with one key: the same prompt twice, and one that is refused."""
    patient = RetryPolicy(attempts=1)
    async with AsyncBatonClient(
        watched.stack.target, api_key=watched.keys["alice"], timeout_s=WAIT_S, retry=patient
    ) as client:
        for turn in range(4):
            prompt = [*prompt_of_all, *range(200, 200 + turn)]
            await asyncio.gather(*(client.complete(prompt, max_tokens=16, ignore_eos=True) for _ in range(2)))
        with pytest.raises(BatonClientError):
            await client.complete(PROMPT, max_tokens=10**6)


def without_data(prometheus: Prometheus) -> list[str]:
    """Return `dashboard, panel: query` of each query without data."""
    found = []
    for path in sorted(BOARDS.glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                samples = prometheus.query(target["expr"].replace(WINDOW, "1m"))
                numbers = [float(sample["value"][1]) for sample in samples]
                known = bool(samples) if panel["title"] in NEEDS_A_FAILURE else not all(map(math.isnan, numbers))
                if not known:
                    found.append(f"{path.stem}, {panel['title']}: {target['expr']}")
    return found


def traces_of(prometheus: Prometheus, selector: str) -> set[str]:
    """Return the trace ids of a histogram's exemplars."""
    series = prometheus.exemplars(selector)
    return {exemplar["labels"]["trace_id"] for each in series for exemplar in each["exemplars"]}


def written_traces(stack: Stack) -> set[str]:
    return {span["trace_id"] for span in stack.spans()}


def soon(condition: Any, wanted: Any) -> Any:
    """Poll a value until it is as wanted or the time is over; return the last value."""
    deadline = time.monotonic() + WAIT_S
    while (seen := condition()) != wanted and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return seen


async def test_every_panel_has_data_and_every_latency_a_trace_after_a_short_load(watched: Watched) -> None:
    prometheus = watched.prometheus
    # A rate needs two scrapes, and a histogram appears with its first request: so one scrape must come before the load
    # that is measured.
    assert soon(lambda: len(prometheus.query("baton:workers == 1")), 2) == 2
    await load(watched, PROMPT)
    assert soon(lambda: len(prometheus.query("vllm:e2e_request_latency_seconds_count > 0")), 1) == 1
    await load(watched, PROMPT[::-1])  # a new prompt, so that the disk tier is searched
    assert soon(lambda: without_data(prometheus), []) == []

    for name in ("vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"):
        linked = traces_of(prometheus, f"{name}_bucket")
        assert linked and soon(lambda linked=linked: linked - written_traces(watched.stack), set()) == set(), name

    assert prometheus.query('ALERTS{alertstate="firing"}') == []
    ended = "sum(baton:key_requests_ended_total)"
    assert soon(lambda: [each["value"][1] for each in prometheus.query(ended)], ["18"]) == ["18"]
