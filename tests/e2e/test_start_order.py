"""Processes may start in any order, and Redis may die once they know each other."""

import asyncio
import random
from pathlib import Path

import pytest

from baton.client import AsyncBatonClient
from baton.process.registry.redis_server import RedisServer, start_redis_server
from tests.e2e.stack import Stack, make_stack

SEEN_S = 30.0


async def serves(stack: Stack) -> bool:
    async with AsyncBatonClient(stack.target, timeout_s=60) as baton:
        answer = await baton.complete([5, 6, 7], max_tokens=4, ignore_eos=True)
    return len(answer.choices[0].token_ids) == 4


@pytest.mark.parametrize("first", ["router", "decode-0"])
async def test_any_process_may_be_first_and_redis_last(tiny_llama: Path, tmp_path: Path, first: str) -> None:
    stack = make_stack(tmp_path, tiny_llama)
    assert stack.redis is not None
    port = port_of(stack.redis)
    stack.redis.stop()
    others = [name for name in stack.processes if name != first]
    random.Random(first).shuffle(others)
    try:
        stack.start([first])
        stack.wait_for(lambda: "INFO" in stack.processes[first].text(), 60, f"sign of life from {first}")
        stack.start(others)
        stack.redis = start_redis_server(port)
        await asyncio.to_thread(stack.wait_ready)
        assert await serves(stack)
    finally:
        stack.stop()


async def test_requests_go_on_without_redis_and_after_its_return(stack: Stack) -> None:
    assert stack.redis is not None
    stack.redis.process.kill()
    stack.redis.process.wait()
    try:
        await asyncio.to_thread(
            stack.wait_for, lambda: not stack.status().registry_connected, SEEN_S, "loss of Redis seen"
        )
        assert await serves(stack)
        check_ready_with_two_workers(stack)
    finally:
        stack.redis = start_redis_server(port_of(stack.redis))
    await asyncio.to_thread(stack.wait_for, lambda: stack.status().registry_connected, SEEN_S, "return of Redis seen")
    assert await serves(stack)
    check_ready_with_two_workers(stack)


def check_ready_with_two_workers(stack: Stack) -> None:
    status = stack.status()
    assert status.ready
    assert len([worker for worker in status.workers if worker.connected]) == 2


def port_of(redis: RedisServer) -> int:
    return int(redis.url.rpartition(":")[2].partition("/")[0])
