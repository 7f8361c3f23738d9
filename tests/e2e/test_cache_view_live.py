"""The router's view of its workers' prefix caches is right under evictions, and again after a process is killed."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.client import WorkerStatus
from baton.process.registry.redis_server import start_redis_server
from tests.e2e.conftest import run
from tests.e2e.stack import Stack, make_stack
from tests.fixtures.cache_predictions import figures, read_spans
from tests.fixtures.conversations import ConversationLoad, converse

EXACT_AGAIN_S = 30.0
BACK_S = 60.0
SHAPE = ConversationLoad(conversations=40, at_once=6, systems=3, pause_s=0.05)
LEAST_EQUAL_SHARE = 0.95  # for this few requests; for many it is 0.99


@pytest.fixture(scope="module")
def small(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """2P+2D; the pool of each worker holds about ten conversations."""
    flags = ["--kv-memory", "3MiB"]
    yield from run(make_stack(tmp_path_factory.mktemp("small"), tiny_llama, 2, 2, worker_flags=flags))


def views(stack: Stack) -> dict[str, WorkerStatus]:
    return {worker.worker_id: worker for worker in stack.status().workers if worker.connected}


def exact(stack: Stack) -> bool:
    """Return whether the router knows the caches of all four workers exactly as they report them."""
    known = [worker.cache_view for worker in views(stack).values()]
    return len(known) == 4 and all(view is not None and view.follows and view.exact for view in known)


def blocks(stack: Stack) -> dict[str, int]:
    return {name: worker.cache_view.blocks for name, worker in views(stack).items() if worker.cache_view is not None}


def all_cached(stack: Stack) -> dict[str, int]:
    """Return the cached pages of all workers, which must be idle, by their own counts."""
    return {name: worker.load.pages.cached for name, worker in views(stack).items() if worker.load is not None}


async def test_predictions_hold_under_evictions(small: Stack) -> None:
    outcome = await converse(small.target, SHAPE, seed=3, on_ended=lambda ended: None)
    assert outcome.failed == 0
    await asyncio.to_thread(small.wait_for, lambda: exact(small), EXACT_AGAIN_S, "exact view after the load")

    def written() -> bool:
        return figures(read_spans(small.traces)).requests >= outcome.requests

    await asyncio.to_thread(small.wait_for, written, EXACT_AGAIN_S, "trace")
    found = figures(read_spans(small.traces))
    assert found.prefill.actual_tokens > 0 and found.decode.actual_tokens > 0
    assert found.equal_share >= LEAST_EQUAL_SHARE, found
    workers = views(small).values()
    assert all(worker.cache_view is not None and worker.cache_view.resyncs == 0 for worker in workers)
    assert any(worker.load is not None and worker.load.pages.free < 10 for worker in workers), "nothing was evicted"


@pytest.mark.parametrize("name", ["decode-0", "prefill-1"])
async def test_killed_worker_is_known_exactly_when_it_is_back(small: Stack, name: str) -> None:
    before = views(small)[name].epoch
    small.processes[name].kill()
    small.processes[name].start()

    def back() -> bool:
        worker = views(small).get(name)
        return worker is not None and worker.epoch != before

    await asyncio.to_thread(small.wait_for, back, BACK_S, f"return of {name}")
    await asyncio.to_thread(small.wait_for, lambda: exact(small), EXACT_AGAIN_S, "exact view")
    assert blocks(small)[name] <= 2, "its cache has only what the canary left there since"


async def test_restarted_router_learns_all_cached_blocks(small: Stack) -> None:
    await converse(small.target, ConversationLoad(8, 8, turns=(1, 2)), seed=4, on_ended=lambda ended: None)
    await asyncio.to_thread(small.wait_idle)  # a worker that still holds pages may yet publish them
    await asyncio.to_thread(small.wait_for, lambda: exact(small), EXACT_AGAIN_S, "exact view")
    before = blocks(small)
    small.processes["router"].kill()
    small.processes["router"].start()
    await asyncio.to_thread(small.wait_ready)
    await asyncio.to_thread(small.wait_for, lambda: exact(small), EXACT_AGAIN_S, "exact view")
    assert sum(before.values()) > 8
    await asyncio.to_thread(small.wait_idle)
    await asyncio.to_thread(small.wait_for, lambda: all_cached(small) == blocks(small), EXACT_AGAIN_S, "all blocks")
    assert sum(blocks(small).values()) >= sum(before.values())


async def test_loss_and_return_of_redis_change_nothing(small: Stack) -> None:
    assert small.redis is not None
    port = int(small.redis.url.rpartition(":")[2].partition("/")[0])
    small.redis.process.kill()
    small.redis.process.wait()
    await asyncio.to_thread(small.wait_for, lambda: not small.status().registry_connected, BACK_S, "loss of Redis seen")
    await converse(small.target, ConversationLoad(4, 4, turns=(1, 2)), seed=5, on_ended=lambda ended: None)
    await asyncio.to_thread(small.wait_for, lambda: exact(small), EXACT_AGAIN_S, "exact view without Redis")
    small.redis = start_redis_server(port)
    await asyncio.to_thread(small.wait_for, lambda: small.status().registry_connected, BACK_S, "return of Redis seen")
    await asyncio.to_thread(small.wait_for, lambda: exact(small), EXACT_AGAIN_S, "exact view with Redis")
