"""Overload of a real stack: a caller with many requests is refused with Retry-After, one with few is served."""

import asyncio
import itertools
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from baton.client import AsyncBatonClient, Busy, DeadlineExceeded, RetryPolicy
from tests.e2e.conftest import run
from tests.e2e.stack import Stack, StackProcess, make_stack
from tests.fixtures.waiting import eventually

PROMPT_TOKENS = 70
CANARY_TOKENS = 33  # of each readiness probe
WAIT_S = 30.0
SLOTS, WAITING, NOISY = 2, 4, 30


@pytest.fixture(scope="module")
def small(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Decode worker with few slots, and a short queue."""
    # A test stops the worker for a while, but less than these 60 s.
    flags = ("--max-waiting-per-tenant", str(WAITING), "--session-silence-s", "60")
    stack = make_stack(tmp_path_factory.mktemp("small"), tiny_llama, with_redis=False, router_flags=flags)
    stack.processes["decode-0"].command += ["--max-sequences", str(SLOTS)]
    yield from run(stack)


def looked_up_tokens(stack: Stack) -> int:
    """Return the prompt tokens of all requests so far: the decode worker looks each prompt up in its cache."""
    return sum(w.load.cache_query_tokens for w in stack.status().workers if w.load is not None and w.role == "decode")


def turns(stack: Stack) -> list[str]:
    """Return the caller of each answered request, in the order in which the router admitted them."""
    spans = stack.spans()
    given_ns = {span["parent_span_id"]: span["end_ns"] for span in spans if span["name"] == "router.queue"}
    answered = [span for span in spans if span["attributes"].get("baton.outcome") == "answered"]
    names = {str(span["attributes"]["gen_ai.response.id"]): given_ns.get(span["span_id"]) for span in answered}
    both = [name for name, at_ns in names.items() if name.startswith(("noisy", "quiet")) and at_ns is not None]
    return sorted(both, key=names.__getitem__)


@contextmanager
def held_up(worker: StackProcess) -> Iterator[None]:
    """Stop the worker while the block runs."""
    worker.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        worker.signal(signal.SIGCONT)


async def ask(baton: AsyncBatonClient, number: int, api_key: str) -> float | None:
    """Send a request; return Retry-After if it was refused."""
    prompt = [3 + (number * 31 + place) % 250 for place in range(PROMPT_TOKENS)]
    try:
        await baton.complete(
            prompt,
            max_tokens=120,
            ignore_eos=True,
            api_key=api_key,
            cache_salt=str(number),
            request_id=f"{api_key}-{number}",
        )
    except Busy as busy:
        assert busy.retry_after_s is not None
        return busy.retry_after_s
    return None


async def test_noisy_caller_is_rejected_before_prefill_and_a_quiet_one_served(small: Stack) -> None:
    async with AsyncBatonClient(small.target, timeout_s=WAIT_S, retry=RetryPolicy(attempts=1)) as baton:
        assert await ask(baton, 1000, "") is None
        # The canaries came before: the router was not ready without them.
        least = PROMPT_TOKENS + CANARY_TOKENS
        await asyncio.to_thread(small.wait_for, lambda: looked_up_tokens(small) >= least, WAIT_S, "report of the first")
        before = looked_up_tokens(small)
        with held_up(small.processes["decode-0"]):
            noisy = [asyncio.create_task(ask(baton, number, "noisy")) for number in range(NOISY)]
            await eventually(lambda: sum(task.done() for task in noisy) == NOISY - SLOTS - WAITING)
            asked_quietly = asyncio.create_task(ask(baton, 100, "quiet"))
            await eventually(lambda: asyncio.to_thread(lambda: small.status().queued_requests == WAITING + 1))
        quiet = await asked_quietly
        refused = [retry_after_s for retry_after_s in await asyncio.gather(*noisy) if retry_after_s is not None]
    assert quiet is None, "the quiet caller was refused"
    assert len(refused) == NOISY - SLOTS - WAITING
    served = NOISY - len(refused) + 1
    await asyncio.to_thread(
        small.wait_for, lambda: len(turns(small)) == served, WAIT_S, "traces of all that were served"
    )
    assert turns(small)[-1] != "quiet-100", "the quiet caller was served after all others"
    assert all(0.1 <= retry_after_s <= 60.0 for retry_after_s in refused)
    await asyncio.to_thread(small.wait_idle)
    expected = before + PROMPT_TOKENS * served
    await asyncio.to_thread(
        small.wait_for, lambda: looked_up_tokens(small) >= expected, WAIT_S, "reports of the last one"
    )
    assert looked_up_tokens(small) == expected, "something was begun for a refused one"


async def is_refused_in_time(baton: AsyncBatonClient, deadline_s: float) -> bool:
    """Return whether a request was refused before its deadline; a busy machine may be too slow for that."""
    try:
        await baton.complete(
            [5] * PROMPT_TOKENS, max_tokens=120, ignore_eos=True, timeout_s=deadline_s, api_key="hasty"
        )
    except Busy as busy:
        assert "the request would be pending for" in str(busy)
        return True
    except DeadlineExceeded:
        return False
    raise AssertionError("it was answered by a worker that was held up")


async def test_request_that_cannot_be_served_by_its_deadline_is_refused_before_that(small: Stack) -> None:
    async with AsyncBatonClient(small.target, timeout_s=WAIT_S, retry=RetryPolicy(attempts=1)) as baton:
        with held_up(small.processes["decode-0"]):
            patient = [asyncio.create_task(ask(baton, 200 + number, "patient")) for number in range(SLOTS + WAITING)]
            await eventually(lambda: asyncio.to_thread(lambda: small.status().queued_requests == WAITING))
            async with asyncio.timeout(WAIT_S):
                for deadline_s in itertools.cycle((0.5, 1.0, 2.0, 4.0)):
                    if await is_refused_in_time(baton, deadline_s):
                        break
        assert await asyncio.gather(*patient) == [None] * (SLOTS + WAITING)
