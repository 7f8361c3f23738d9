"""Stack for faults: two routers, 2P+2D, checksums of all blocks, an impatient watchdog, and workers that can hang."""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from baton.client import AsyncBatonClient, Delta, RetryPolicy
from baton.process.registry.redis_server import RedisServer, start_redis_server
from tests.e2e.held import make_answers_holdable
from tests.e2e.stack import Stack, make_stack

STALL_S = 2.0
HANG_FILE = "hangs"
SECOND_ROUTER = "router-1"
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")


def make_faulty_stack(folder: Path, model: Path) -> Stack:
    flags = ["--checksum-share", "1", "--stall-s", str(STALL_S), "--kv-memory", "8MiB"]
    patient = ["--session-silence-s", "6"]  # some tests stop a worker for a moment
    stack = make_stack(folder, model, prefill=2, decode=2, worker_flags=flags, router_flags=patient)
    stack.add_router(SECOND_ROUTER)
    for name in WORKERS:
        command = stack.processes[name].command
        place = command.index(f"baton.{name.partition('-')[0]}_worker")
        command[place : place + 1] = ["tests.fixtures.hanging_worker", name.partition("-")[0], str(folder / HANG_FILE)]
    make_answers_holdable(stack)
    return stack


def targets_of(stack: Stack) -> tuple[str, ...]:
    """Return the addresses of both routers."""
    commands = (stack.processes[name].command for name in ("router", SECOND_ROUTER))
    return tuple(f"127.0.0.1:{command[command.index('--port') + 1]}" for command in commands)


def second_of(stack: Stack) -> Stack:
    """Return a stack that addresses the second router."""
    command = stack.processes[SECOND_ROUTER].command
    port, admin_port = (int(command[command.index(flag) + 1]) for flag in ("--port", "--admin-port"))
    return Stack(stack.folder, port, admin_port, stack.processes, stack.redis)


def redis_of(stack: Stack) -> RedisServer:
    assert stack.redis is not None
    return stack.redis


def redis_port(stack: Stack) -> int:
    return int(redis_of(stack).url.rpartition(":")[2].removesuffix("/0"))


def restart_redis(stack: Stack) -> None:
    """Start an empty Redis at the old address."""
    stack.redis = start_redis_server(redis_port(stack))


@dataclass(frozen=True, slots=True)
class Served:
    """Latencies of short requests."""

    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


async def serve_some(stack: Stack, count: int = 9) -> Served:
    """Send requests one after another, each with a new prompt; a failed one fails the test."""
    seconds = []
    async with AsyncBatonClient(stack.target, timeout_s=20, retry=RetryPolicy(attempts=1)) as baton:
        for number in range(count):
            began = time.monotonic()
            answer = await baton.complete([7 + number, 5, 6, 7], max_tokens=3, ignore_eos=True)
            seconds.append(time.monotonic() - began)
            assert len(answer.choices[0].token_ids) == 3
    return Served(tuple(seconds))


async def stream(stack: Stack, prompt: list[int], tokens: int) -> list[int]:
    """Stream an answer and return its tokens."""
    seen: list[int] = []
    async with AsyncBatonClient(stack.target, timeout_s=60, retry=RetryPolicy(attempts=1)) as baton:
        async for event in baton.generate(prompt, max_tokens=tokens, ignore_eos=True):
            seen += event.token_ids if isinstance(event, Delta) else []
    return seen


async def while_streaming(stack: Stack, work: Callable[[], Awaitable[None]], tokens: int = 600) -> None:
    """Do `work` while an answer is streamed, and check that the answer is the same as without it."""
    undisturbed = await stream(stack, [9, 8, 7], tokens)
    streaming = asyncio.create_task(stream(stack, [9, 8, 7], tokens))
    await work()
    assert await streaming == undisturbed and len(undisturbed) == tokens
