"""The load shifts from long prompts to long answers on 2P+1D: the planner changes a worker's role, no request fails."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.lab.benchmarks.serve.load import Job, ServiceLoad, random_tokens
from baton.lab.benchmarks.serve.targets import BatonTarget
from baton.lab.harness.processes import HarnessWorker, RunningCluster, router_and_workers
from baton.launch.tiny_checkpoint import VOCABULARY, write_tiny_checkpoint
from tests.e2e.stack import SILENCE_S
from tests.fixtures.forked_programs import fork_programs

STEP_MS, TOKEN_MS, SLOTS = 8.0, 0.25, 4
PROMPTS_S, ANSWERS_S = 3.0, 40.0  # duration of each phase; the second ends with the change of a role
LONG_PROMPT, SHORT_ANSWER = 480, 4  # tokens
SHORT_PROMPT, LONG_ANSWER = 32, 160
PROMPTS_PER_S = 1.2 * 1e3 / (LONG_PROMPT * TOKEN_MS)  # 20% more than one prefill worker can compute
ANSWERS_PER_S = 1.5 * 1e3 * SLOTS / (LONG_ANSWER * STEP_MS)  # 50% more than one decode worker can generate
DEADLINE_S, POLL_S = 4.0, 0.5
PLANNER = ("--planner", "act", "--planner-hold-s", 2, "--planner-cool-down-s", 3)
SLOS = ("--ttft-slo-ms", 1000, "--tbt-slo-ms", 100)


def workers(model: Path) -> Iterator[HarnessWorker]:
    pace = ("--decode-step-ms", STEP_MS, "--prefill-token-ms", TOKEN_MS, "--max-sequences", SLOTS)
    for name in ("prefill-0", "prefill-1", "decode-0"):
        role = ("--role", name.partition("-")[0])
        flags = (*role, *pace, "--model", model, "--kv-memory", "64MiB")
        yield HarnessWorker(name, "tests.fixtures.paced_worker", flags)


def random_arrivals_s(chance: random.Random, rate: float, begin_s: float, end_s: float) -> Iterator[float]:
    """Yield the arrivals of a Poisson process between two times."""
    while (begin_s := begin_s + chance.expovariate(rate)) < end_s:
        yield begin_s


def jobs(counts: list[int]) -> Iterator[Job]:
    """Yield long prompts, then long answers until a second decode worker serves."""
    chance, end_s = random.Random(5), PROMPTS_S + ANSWERS_S
    for at_s in random_arrivals_s(chance, PROMPTS_PER_S, 0.0, PROMPTS_S):
        yield Job(random_tokens(chance, LONG_PROMPT, VOCABULARY), SHORT_ANSWER, at_s)
    for at_s in random_arrivals_s(chance, ANSWERS_PER_S, PROMPTS_S, end_s):
        if max(counts) > 1:
            return
        yield Job(random_tokens(chance, SHORT_PROMPT, VOCABULARY), LONG_ANSWER, at_s)


async def decode_workers(cluster: RunningCluster) -> int:
    status = await cluster.status()
    serving = (each for each in (status.workers if status else ()) if each.connected and each.load)
    return sum(each.role == "decode" and each.load is not None and not each.load.draining for each in serving)


async def test_planner_shifted_load_changes_a_role_and_fails_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_programs(monkeypatch)
    monkeypatch.setenv("BATON_SESSION_SILENCE_S", SILENCE_S)
    write_tiny_checkpoint(tmp_path / "tiny")
    async with router_and_workers(tmp_path, tuple(workers(tmp_path / "tiny")), (*PLANNER, *SLOS)) as cluster:
        counts = [await decode_workers(cluster)]
        target = BatonTarget(cluster.target, timeout_s=DEADLINE_S)

        async def poll() -> None:
            while True:
                await asyncio.sleep(POLL_S)
                counts.append(await decode_workers(cluster))

        polling = asyncio.create_task(poll())
        run = await ServiceLoad(target.answer).open_loop(jobs(counts))
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)
        await target.close()
    assert counts[0] == 1
    assert max(counts) == 2, (tmp_path / "router.log").read_text()[-2000:]
    assert [outcome for outcome in run.outcomes if outcome.result == "failed"] == []
    assert sum(outcome.result == "answered" for outcome in run.outcomes) > 10
