"""Four routers on one gRPC port and one HTTP port: all are reached, and none loses anything when it dies or drains."""

import asyncio
import json
import signal
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from baton.client import AsyncBatonClient, Delta
from tests.e2e.conftest import run
from tests.e2e.held import answers_held, make_answers_holdable
from tests.e2e.stack import Stack, StackProcess, make_stack

ROUTERS = 4
STREAMS = 16
TOKENS, HELD_TOKENS = 150, 100  # tokens of an answer; number of tokens after which it pauses
MAX_TRIES = 200  # connections after which every router was reached, with a probability of failure of 1e-24
REACHED_S = 60.0


@dataclass(frozen=True)
class Service:
    stack: Stack
    routers: Sequence[Stack]  # one for each router, with ports of its own

    @property
    def processes(self) -> list[StackProcess]:
        return [process for name, process in self.stack.processes.items() if name.startswith("router")]

    def started(self) -> list[int]:
        """Return the number of requests that each router has had."""
        return [each.status().requests.started for each in self.routers]

    def wait_reached(self, request: Callable[[int], object]) -> None:
        """Send requests until each router has had one more. Each `request` must open a connection of its own."""
        before = self.started()
        for number in range(MAX_TRIES):
            request(number)
            if all(now > then for now, then in zip(self.started(), before, strict=True)):
                return
        raise AssertionError(f"requests by router: {before} before, {self.started()} afterwards")


@pytest.fixture(scope="module")
def running(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    stack = make_stack(tmp_path_factory.mktemp("one-port"), tiny_llama, decode=2)
    make_answers_holdable(stack)
    routers = stack.share_ports(ROUTERS)
    workers = sum(not name.startswith("router") for name in stack.processes)
    for _ in run(stack, workers):
        yield Service(stack, routers)


@pytest.fixture
def service(running: Service) -> Iterator[Service]:
    """All four routers serve, also after the test."""
    for process, router in zip(running.processes, running.routers, strict=True):
        if not process.runs:
            process.start()
        router.wait_ready(workers=3)
    yield running
    for process in running.processes:
        if not process.runs:
            process.start()
    running.stack.wait_ready(workers=3)
    running.stack.wait_idle()


def complete_over_http(url: str, prompt: Sequence[int]) -> str:
    """Return the text of a completion, asked on a connection of its own and without retries."""
    body = json.dumps({"prompt": list(prompt), "max_tokens": 4, "temperature": 0}).encode()
    asked = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
    return text


async def tokens_of(target: str, number: int, begun: set[int] | None = None, **options: Any) -> list[list[int]]:
    """Stream an answer with a client of its own, and return the tokens of each choice, checked to be contiguous."""
    choices: dict[int, list[int]] = {}
    async with AsyncBatonClient(target, timeout_s=60) as baton:
        async for event in baton.generate([7 + number, 8, 9] * 15, ignore_eos=True, **options):
            if isinstance(event, Delta):
                tokens = choices.setdefault(event.index, [])
                assert event.offset == len(tokens)
                tokens += event.token_ids
                if begun is not None:
                    begun.add(number)
    return [choices[index] for index in sorted(choices)]


def options_of(number: int) -> dict[str, Any]:
    return {"max_tokens": TOKENS, **({"temperature": 1.0, "seed": number, "n": 2} if number % 3 == 0 else {})}


async def all_streams(target: str, begun: set[int]) -> list[list[list[int]]]:
    return await asyncio.gather(*(tokens_of(target, n, begun, **options_of(n)) for n in range(STREAMS)))


def test_grpc_requests_reach_every_router(service: Service) -> None:
    service.wait_reached(lambda number: asyncio.run(tokens_of(service.stack.target, number, max_tokens=2)))


def test_http_requests_reach_every_router(service: Service) -> None:
    service.wait_reached(lambda number: complete_over_http(service.stack.url, [7 + number, 8, 9]))


def started_by_metrics(router: Stack) -> int:
    with urllib.request.urlopen(f"{router.url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    [line] = [line for line in lines if line.startswith("baton:requests_started_total")]
    return round(float(line.rpartition(" ")[2]))


def test_metrics_port_has_the_metrics_of_one_router(service: Service) -> None:
    before = [started_by_metrics(each) for each in service.routers]
    complete_over_http(service.routers[2].url, [5, 6, 7])
    after = [started_by_metrics(each) for each in service.routers]
    assert [now - then for now, then in zip(after, before, strict=True)] == [0, 0, 1, 0]


def test_routers_name_each_other_by_their_admin_ports(service: Service) -> None:
    others = {router.address for router in service.routers[0].status().routers}
    assert others == {f"127.0.0.1:{each.admin_port}" for each in service.routers[1:]}


async def test_streams_of_a_killed_router_resume_through_the_same_address(service: Service) -> None:
    target = service.stack.target
    undisturbed = await all_streams(target, set())
    begun: set[int] = set()
    with answers_held(service.stack, HELD_TOKENS) as held:
        calls = asyncio.create_task(all_streams(target, begun))
        async with asyncio.timeout(REACHED_S):
            while len(begun) < STREAMS and not calls.done():
                await asyncio.sleep(0.01)
        await held.worker()
        statuses = await asyncio.gather(*(asyncio.to_thread(each.status) for each in service.routers))
        active = [each.active_requests for each in statuses]
        assert sum(active) == STREAMS and sum(map(bool, active)) > 1, active
        busiest = active.index(max(active))
        service.processes[busiest].kill()
    assert await calls == undisturbed


async def test_restarted_router_shares_the_port_again(service: Service) -> None:
    service.processes[1].kill()
    await tokens_of(service.stack.target, 1, max_tokens=2)
    service.processes[1].start()
    await asyncio.to_thread(service.routers[1].wait_ready, 3)
    await asyncio.to_thread(service.wait_reached, lambda number: complete_over_http(service.stack.url, [9, number + 7]))


async def test_routers_that_are_replaced_in_turn_fail_no_request(service: Service) -> None:
    target, url = service.stack.target, service.stack.url
    rolled = asyncio.Event()

    async def stream() -> list[list[list[int]]]:
        answers = []
        while not rolled.is_set():
            answers.append(await tokens_of(target, 3, max_tokens=40))
        return answers

    async def ask() -> list[str]:
        answers = []
        while not rolled.is_set():
            answers.append(await asyncio.to_thread(complete_over_http, url, [3, 4, 5]))
        return answers

    streams, texts = [asyncio.create_task(stream()) for _ in range(3)], [asyncio.create_task(ask()) for _ in range(3)]
    for process, router in zip(service.processes, service.routers, strict=True):
        process.signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.ended) == 0
        process.start()
        await asyncio.to_thread(router.wait_ready, 3)
    rolled.set()
    answers = [answer for each in await asyncio.gather(*streams) for answer in each]
    replies = [reply for each in await asyncio.gather(*texts) for reply in each]
    assert len({str(answer) for answer in answers}) == 1 and len(set(replies)) == 1
    assert len(answers) > ROUTERS and len(replies) > ROUTERS
