"""A peer that goes and comes back, again and again: whoever reads from it keeps nothing of its earlier lives."""

import asyncio
import gc
import os
import secrets
import threading
from typing import NamedTuple

import torch

from baton.kvtransfer.description import PoolDescription
from baton.kvtransfer.puller import PullThread
from baton.process.registry.redis_server import free_port
from baton.worker.transfer.peers import Peers
from tests.fixtures.session_client import SessionClient, eventually
from tests.fixtures.worker_stack import DecodeStack, PrefillStack, prompt_command, running, start_command

LIVES = 6  # 20 are as flat
SETTLED_AFTER = 3  # lives in which threads of gRPC and the like are made, once
SLACK = 2


class Kept(NamedTuple):
    descriptors: int
    threads: int
    mappings: int  # of KV pools


def kept() -> Kept:
    gc.collect()
    with open("/proc/self/maps") as maps:  # noqa: PTH123 -- no file
        mappings = sum("baton-kv-pool" in line for line in maps)
    return Kept(len(os.listdir("/proc/self/fd")), threading.active_count(), mappings)  # noqa: PTH208


async def read_once(prefill: PrefillStack, decode: DecodeStack, router: SessionClient, attempt: int) -> None:
    """One prompt goes over."""
    identity = secrets.token_bytes(16)
    async with SessionClient(prefill.endpoint) as to_prefill:
        await router.send(start=start_command(attempt, identity, prefill.endpoint))
        await to_prefill.send(prefill=prompt_command(attempt, identity))
        await eventually(lambda: len(router.tokens(attempt)) == 4 or router.about("failed", attempt))


async def test_peer_that_does_not_return_is_released_without_another_transfer() -> None:
    async with running(DecodeStack()) as decode, SessionClient(decode.endpoint) as router:
        own = kept().mappings
        for life in range(1, 4):
            async with running(PrefillStack()) as prefill:
                await read_once(prefill, decode, router, attempt=life)
            assert len(router.tokens(life)) == 4
            del prefill
            await eventually(lambda: kept().mappings == own)
            assert not decode.reader.links


async def test_stop_ends_the_sweep_before_it_waits_for_pairings_under_way() -> None:
    """A peer that goes in that time would be closed by both."""
    pool = torch.zeros(64, dtype=torch.uint8)
    peers = Peers(PoolDescription(b"f" * 32, 64, 1, "host", b"pool"), pool, PullThread(None), "auto", 5.0)
    is_cancelled, may_end = asyncio.Event(), asyncio.Event()

    async def pair(endpoint: str) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            is_cancelled.set()
            await may_end.wait()
            raise

    peers._pair = pair  # type: ignore[assignment, method-assign]
    borrowing = asyncio.create_task(peers.borrow("anywhere"))
    await eventually(lambda: peers._sweeping is not None)
    closing = asyncio.create_task(peers.close())
    await is_cancelled.wait()
    assert peers._sweeping is not None and peers._sweeping.done() and not closing.done()
    may_end.set()
    await closing
    await asyncio.gather(borrowing, return_exceptions=True)


async def test_nothing_is_left_of_a_peers_earlier_lives() -> None:
    port, after = free_port(), list[Kept]()
    async with running(DecodeStack()) as decode, SessionClient(decode.endpoint) as router:
        for life in range(1, LIVES + 1):
            prefill = PrefillStack()
            await prefill.start(port)
            for again in range(2):  # the first may find out that another process has come
                await read_once(prefill, decode, router, attempt=10 * life + again)
            assert len(router.tokens(10 * life + 1)) == 4
            await prefill.stop()
            after.append(kept())
        settled = after[SETTLED_AFTER]
        await eventually(lambda: no_more_than(settled, kept()))  # a connection closes after it was let go


def no_more_than(settled: Kept, last: Kept) -> bool:
    """But for SLACK."""
    return (
        last.descriptors <= settled.descriptors + SLACK
        and last.threads <= settled.threads + SLACK
        and last.mappings <= settled.mappings
    )
