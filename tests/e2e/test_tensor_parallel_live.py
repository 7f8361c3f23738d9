"""Stack of workers with different tensor-parallel degrees: answers equal transformers, and a rank may die.

KV of a prompt goes from one rank to two, and that of an answer from two to one when the prefill worker fetches it.
"""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from baton.client import AsyncBatonClient, Delta, RetryPolicy, Unavailable
from tests.e2e.conftest import run
from tests.e2e.held import answers_held, make_answers_holdable
from tests.e2e.oracle import Oracle, ask_transformers, check_answers, greedy, make_asked
from tests.e2e.stack import Stack, make_router, make_stack
from tests.fixtures.ended import has_ended
from tests.fixtures.random_schemas import random_schema

TOGETHER = 12
LONGEST = 5  # index of the oracle's longest prompt, whose blocks are fetched with those of its answer
QUESTION = list(range(40, 70))
TOKENS, LONG_TOKENS = 200, 1_900
HELD_TOKENS = 50  # before its end, an answer pauses until its worker or a rank is killed
TRACE_WRITTEN_S = 30.0
NOTICED_S = 20.0  # a third of the time after which the other ranks would give up anyway


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_asked(tmp_path_factory.mktemp("model") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return ask_transformers(model, TOGETHER)


@pytest.fixture(scope="module")
def stack(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    flags = ("--local-prefill-tokens", "0", "--no-prefill-worker", "queue", "--attempts", "1")
    stack = make_stack(tmp_path_factory.mktemp("stack"), model, with_redis=False, router_flags=flags)
    stack.processes["prefill-0"].command += ["--fetch", "always", "--fetch-timeout-s", "30"]
    stack.processes["decode-0"].command += ["--tensor-parallel", "2"]
    make_answers_holdable(stack)
    yield from run(stack)


def followers_of(process_id: int) -> list[int]:
    threads = Path(f"/proc/{process_id}/task").glob("*/children")  # children of all threads
    found = [int(child) for children in threads for child in children.read_text().split()]
    return [pid for pid in found if b"rank_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]


async def test_kv_of_one_rank_and_kv_of_two_give_transformers_answers(stack: Stack, oracle: Oracle) -> None:
    answers = await check_answers(stack.target, oracle)
    assert {answer.timings.prefill_pid for answer in answers} == {stack.processes["prefill-0"].pid}
    assert {answer.timings.transport for answer in answers} == {"shared_memory"}
    assert sum(answer.timings.transfer_bytes for answer in answers) > 0

    turn = [*oracle.prompts[LONGEST], *oracle.answers[LONGEST], *QUESTION]
    async with AsyncBatonClient(stack.target, timeout_s=30) as client:
        second = await client.complete(turn, max_tokens=24, temperature=0.0)
    answer = list(second.choices[0].token_ids)
    assert answer == greedy(oracle.model, turn, answer)
    await asyncio.to_thread(stack.wait_for, lambda: fetched_tokens(stack) > 0, TRACE_WRITTEN_S, "fetch in the trace")
    await asyncio.to_thread(stack.wait_idle)


def fetched_tokens(stack: Stack) -> int:
    return sum(span["attributes"]["baton.fetch.tokens"] for span in stack.spans() if span["name"] == "prefill.fetch")


async def test_answer_of_two_ranks_is_held_to_its_form(stack: Stack) -> None:
    """The first token is drawn by the single rank of the prefill worker."""
    schema = random_schema(23)
    async with AsyncBatonClient(stack.target, timeout_s=30) as client:
        answer = await client.complete(QUESTION, json_schema=schema, max_tokens=200, temperature=1.0, seed=5, n=2)
    for choice in answer.choices:
        jsonschema.validate(json.loads(choice.text), schema)
    await asyncio.to_thread(stack.wait_idle)


async def test_answer_of_two_ranks_resumes_after_a_killed_worker(stack: Stack, tmp_path: Path) -> None:
    """The answer so far is recomputed on the prefill worker's single rank, and copied to the two ranks."""
    router = make_router(tmp_path, stack, ("prefill-0", "decode-0"), ("--local-prefill-tokens", "0"))
    worker, asked = stack.processes["decode-0"], {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
    first, [follower] = worker.pid, followers_of(worker.pid)
    router.start()
    await asyncio.to_thread(router.wait_ready, 2)
    tokens: list[int] = []
    async with AsyncBatonClient(router.target, retry=RetryPolicy(attempts=1), timeout_s=120) as client:
        undisturbed = await client.complete(QUESTION, **asked)
        with answers_held(stack, TOKENS - HELD_TOKENS) as held:
            async for event in client.generate(QUESTION, **asked):
                if isinstance(event, Delta):
                    assert event.offset == len(tokens)
                    tokens += event.token_ids
                    if worker.pid == first:
                        worker.kill()
                        held.let_go()
                        worker.start()
    assert tokens == list(undisturbed.choices[0].token_ids)
    assert "failed: WORKER_" in router.processes["router"].text()
    await asyncio.to_thread(stack.wait_for, lambda: has_ended(follower), NOTICED_S, "end of the other rank")
    router.stop()
    await asyncio.to_thread(stack.wait_ready)


async def test_killed_rank_ends_its_worker_and_so_the_attempts_there(stack: Stack) -> None:
    worker = stack.processes["decode-0"]
    [follower] = followers_of(worker.pid)
    os.kill(follower, signal.SIGTERM)  # as when a container stops; only the leader may react
    killed = 0.0
    async with AsyncBatonClient(stack.target, retry=RetryPolicy(attempts=1)) as client:
        with answers_held(stack, LONG_TOKENS - HELD_TOKENS) as held, pytest.raises(Unavailable) as lost:
            async for event in client.generate([5, 6, 7], max_tokens=LONG_TOKENS, ignore_eos=True):
                if isinstance(event, Delta) and not killed and event.offset > 10:
                    os.kill(follower, signal.SIGKILL)
                    killed = time.monotonic()
                    held.let_go()
    assert lost.value.reason == "WORKER_LOST"
    assert time.monotonic() - killed < NOTICED_S
    assert worker.popen is not None
    assert await asyncio.to_thread(worker.popen.wait, NOTICED_S) == 1
    assert time.monotonic() - killed < 2 * NOTICED_S
    assert f"rank 1, process {follower}, ended: exit code -9" in worker.text()
    await asyncio.to_thread(stack.wait_for, lambda: has_ended(follower), NOTICED_S, "end of the other rank")
    worker.popen = None  # so that its exit code is not checked
    worker.log.unlink()  # and neither is its traceback
