"""Two routers, 2P+2D of workers that can change roles: requests are served whichever process dies or changes."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from baton.client import AdminClient, AsyncBatonClient, BatonClientError, RequestExplanation, RetryPolicy
from tests.e2e.conftest import run
from tests.e2e.held import answers_held, make_answers_holdable
from tests.e2e.stack import Stack, make_stack
from tests.fixtures.waiting import eventually

SHARED_S = 20.0  # for information to reach the other router; it takes 0.25 s on a quiet machine
ANSWER_TOKENS = 6
HELD_TOKENS = 1800  # after which answers pause until both routers know of them
FLAGS = ["--planner", "off"]


@dataclass
class Fleet:
    first: Stack
    second: Stack

    @property
    def stacks(self) -> tuple[Stack, Stack]:
        return self.first, self.second


@pytest.fixture(scope="module")
def fleet(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    stack = make_stack(folder, tiny_llama, prefill=2, decode=2, elastic=True, router_flags=FLAGS)
    make_answers_holdable(stack)
    second = stack.add_router("router-1")
    for _ in run(stack):
        second.wait_ready()
        yield Fleet(stack, second)


def explain(stack: Stack, request_id: str) -> RequestExplanation:
    with AdminClient(f"127.0.0.1:{stack.admin_port}", timeout_s=20.0) as admin:
        return admin.explain(request_id)


@dataclass
class Load:
    """Several clients that send short requests through both routers until they are stopped."""

    fleet: Fleet
    served: list[tuple[Stack, str]] = field(default_factory=list)
    failed: list[BatonClientError] = field(default_factory=list)
    answers: Counter[tuple[int, ...]] = field(default_factory=Counter)
    ending: bool = False

    @asynccontextmanager
    async def running(self, lanes: int = 4, attempts: int = 1) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._lane(lane, attempts)) for lane in range(lanes)]
        try:
            yield
        finally:
            self.ending = True
            await asyncio.gather(*tasks)

    async def more(self, requests: int = 8) -> None:
        """Wait until that many more requests are answered."""
        wanted = len(self.served) + requests
        await eventually(lambda: len(self.served) >= wanted)

    async def _lane(self, lane: int, attempts: int) -> None:
        retry = RetryPolicy(attempts=attempts)
        prompt = [5 + lane] * 70  # two full blocks, so that the prompt is prefilled and transferred
        async with (
            AsyncBatonClient(self.fleet.first.target, retry=retry, timeout_s=20) as first,
            AsyncBatonClient(self.fleet.second.target, retry=retry, timeout_s=20) as second,
        ):
            clients = itertools.cycle(((self.fleet.first, first), (self.fleet.second, second)))
            for number in itertools.count():
                if self.ending:
                    return
                stack, client = next(clients)
                name = f"lane-{lane}-{number}-{id(self)}"
                try:
                    answer = await client.complete(
                        prompt, max_tokens=ANSWER_TOKENS, ignore_eos=True, request_id=name, cache_salt=name
                    )
                except BatonClientError as error:
                    self.failed.append(error)
                    await asyncio.sleep(0.05)
                else:
                    self.served.append((stack, name))
                    self.answers[(lane, *answer.choices[0].token_ids)] += 1


async def wait(stack: Stack, condition: Callable[[], bool], within_s: float, what: str) -> None:
    await asyncio.to_thread(stack.wait_for, condition, within_s, what)


def knows(stack: Stack, other_routers: int) -> bool:
    return stack.status().other_routers == other_routers


async def test_routers_know_each_others_charges_on_the_workers(fleet: Fleet) -> None:
    for stack in fleet.stacks:
        await wait(stack, partial(knows, stack, 1), SHARED_S, "other router")
    async with AsyncBatonClient(fleet.first.target) as first, AsyncBatonClient(fleet.second.target) as second:
        streams = [first.generate([9 + number] * 40, max_tokens=1900, ignore_eos=True) for number in range(4)]

        async def elsewhere() -> float:
            name = f"probe-{next(numbers)}"
            await second.complete([3, 4, 5], max_tokens=1, request_id=name)
            attempt = (await asyncio.to_thread(explain, fleet.second, name)).attempts[0]
            return sum(candidate.terms.get("elsewhere_slots", 0.0) for candidate in attempt.candidates)

        numbers = itertools.count()
        with answers_held(fleet.first, HELD_TOKENS):
            for stream in streams:
                await anext(stream)
            async with asyncio.timeout(SHARED_S):
                while await elsewhere() < 4:
                    await asyncio.sleep(0.05)
        for stream in streams:
            await stream.aclose()


def knows_prompt(stack: Stack) -> bool:
    """Return whether a prompt of 200 tokens is cached; the readiness probe has two blocks at most."""
    views = [worker.cache_view for worker in stack.status().workers if worker.role == "prefill"]
    return any(view is not None and view.blocks >= 200 // 32 for view in views)


async def test_explain_shows_the_terms_and_the_outcome(fleet: Fleet) -> None:
    prompt = [7] * 200
    async with AsyncBatonClient(fleet.first.target) as baton:
        await baton.complete(prompt, max_tokens=2, ignore_eos=True, request_id="cold")
        await wait(fleet.first, partial(knows_prompt, fleet.first), SHARED_S, "prompt in the view of a prefill worker")
        await baton.complete(prompt, max_tokens=2, ignore_eos=True, request_id="warm")
    cold, warm = [await asyncio.to_thread(explain, fleet.first, name) for name in ("cold", "warm")]
    assert (cold.status, cold.prompt_tokens, len(cold.attempts)) == ("OK", 200, 1)
    assert cold.attempts[0].actual["cached_tokens"] == 0
    actual = warm.attempts[0].actual  # a decode worker with nearly all of the prompt cached may have computed it
    assert actual.get("cached_tokens", actual["decode_cached_tokens"]) == 192
    for role in ("prefill", "decode"):
        alike = [each for each in cold.attempts[0].candidates if each.role == role]
        (taken,) = [each for each in alike if each.chosen]
        assert taken.terms["cost"] == min(each.terms["cost"] for each in alike)
    assert {each.worker_id for each in cold.attempts[0].candidates} == {
        "prefill-0",
        "prefill-1",
        "decode-0",
        "decode-1",
    }
    assert sum(each.chosen for each in cold.attempts[0].candidates) == 2
    assert 0 < cold.ttft_ms <= cold.total_ms


async def test_workers_change_roles_and_leave_under_load_and_no_request_fails(fleet: Fleet) -> None:
    stack, load = fleet.first, Load(fleet)
    async with load.running():
        await load.more()
        for role in ("decode", "prefill"):
            with AdminClient(f"127.0.0.1:{stack.admin_port}") as admin:
                admin.change_role("prefill-1", role)
            for seen in fleet.stacks:
                await wait(seen, partial(has_role, seen, "prefill-1", role), 20, f"a {role} worker")
            await load.more()
        stack.processes["prefill-1"].terminate()  # it drains: waits until the KV of its prompts is pulled
        await load.more()
        assert await asyncio.to_thread(stack.processes["prefill-1"].ended) == 0
        await load.more()
    assert load.failed == []
    assert len(load.answers) == 4, "the same prompt had different answers"
    await asyncio.to_thread(stack.wait_idle)


def has_role(stack: Stack, worker_id: str, role: str) -> bool:
    """Return whether the worker serves in that role."""
    worker = next((each for each in stack.status().workers if each.worker_id == worker_id), None)
    serves = worker is not None and worker.connected and worker.load is not None and not worker.load.draining
    return worker is not None and serves and worker.role == role


async def test_no_request_tries_a_dead_worker_twice(fleet: Fleet) -> None:
    stack, load = fleet.first, Load(fleet)
    redis = stack.redis
    assert redis is not None
    async with load.running(attempts=6):
        await load.more()
        for victim in ("prefill-0", "router-1", "decode-0"):
            dead = {each.worker_id: each.endpoint for each in stack.status().workers}.get(victim)
            before = len(load.served)
            stack.processes[victim].kill()
            await load.more(12)
            for name in [name for where, name in load.served[before:] if where is stack]:
                failures = Counter(each.failed_endpoint for each in explain(stack, name).attempts if each.failure)
                assert failures[dead or ""] <= 1, f"{name} tried {victim} again"
        stack.start([name for name, process in stack.processes.items() if not process.runs])
        for seen in fleet.stacks:
            await asyncio.to_thread(seen.wait_ready)
        redis.stop()
        await load.more()
        assert all(seen.status().ready for seen in fleet.stacks)
    await wait(stack, partial(knows, stack, 0), SHARED_S, "view of its own")
