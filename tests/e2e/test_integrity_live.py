"""Corrupt memory of a KV pool must not give a wrong answer.

If a byte of a prompt's KV changes between computation and pull, the answer is still exact, and the fault is reported.
KV with NaN ends the answer that reads it, and no other.
"""

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest

from baton.client import AsyncBatonClient, Delta, ServerError
from baton.lab.chaos.watch import pool_range, read_memory, write_memory
from tests.e2e.faulty import stream
from tests.e2e.held import answers_held
from tests.e2e.stack import Stack

PROMPT = [11 + place % 200 for place in range(150)]
TOKENS = 24
PREFILL = ("prefill-0", "prefill-1")
DECODE = ("decode-0", "decode-1")


Pool = np.ndarray[tuple[int, ...], np.dtype[np.uint32]]
NOT_A_NUMBER = 0x7FC00000  # of a float32
FURTHER_TOKENS = 41  # before the answer pauses: more than earlier ones had, whose pages it may reuse unchanged


def pool_of(stack: Stack, name: str) -> Pool:
    addresses = pool_range(stack.processes[name].pid)
    assert addresses is not None, f"{name} has no pool"
    return np.frombuffer(read_memory(stack.processes[name].pid, addresses.start, len(addresses)), dtype=np.uint32)


def pools_of(stack: Stack, names: Sequence[str]) -> dict[str, Pool]:
    return {name: pool_of(stack, name) for name in names}


def spoil(stack: Stack, before: Mapping[str, Pool], word: Callable[[int], int]) -> None:
    """Overwrite the first word of a pool that has changed since, and check that it was overwritten."""
    for name, old in before.items():
        new = pool_of(stack, name)
        places = np.flatnonzero(old != new)
        addresses = pool_range(stack.processes[name].pid)
        if len(places) and addresses is not None:
            place, wanted = int(places[0]), word(int(new[places[0]]))
            write_memory(stack.processes[name].pid, addresses[4 * place], wanted.to_bytes(4, "little"))
            assert pool_of(stack, name)[place] == wanted != new[place]
            return
    raise AssertionError("no worker has written anything")


def mismatches(stack: Stack) -> int:
    workers = stack.status().workers
    return sum(worker.load.checksum_mismatches for worker in workers if worker.load is not None)


async def test_kv_changed_at_its_source_is_recomputed(faulty: Stack) -> None:
    expected = await stream(faulty, PROMPT, TOKENS)
    before = pools_of(faulty, PREFILL)
    assert mismatches(faulty) == 0
    seen: list[int] = []
    async with AsyncBatonClient(faulty.target, timeout_s=30) as baton:
        for name in DECODE:
            faulty.processes[name].signal(signal.SIGSTOP)
        try:
            # with a salt of its own, so that no worker has its blocks cached
            events = baton.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True, cache_salt="flipped")
            async for event in events:
                seen += event.token_ids if isinstance(event, Delta) else []
                if seen:
                    break
            spoil(faulty, before, lambda word: word ^ 1)
        finally:
            for name in DECODE:
                faulty.processes[name].signal(signal.SIGCONT)
        async for event in events:
            seen += event.token_ids if isinstance(event, Delta) else []
    assert seen == expected
    await asyncio.to_thread(faulty.wait_for, lambda: mismatches(faulty) == 1, 15.0, "the mismatch counted")


async def test_answer_with_nonfinite_kv_ends_alone_and_leaves_nothing(faulty: Stack) -> None:
    first, neighbour = [31, 32, 33], [41, 42, 43]
    expected, expected_neighbour = await stream(faulty, first, 24), await stream(faulty, neighbour, 400)
    before = pools_of(faulty, DECODE)
    async with AsyncBatonClient(faulty.target, timeout_s=30) as baton:
        with answers_held(faulty, FURTHER_TOKENS) as held:
            answer = asyncio.create_task(baton.complete(first, max_tokens=1500, ignore_eos=True, cache_salt="spoilt"))
            await held.worker()
            beside = asyncio.create_task(stream(faulty, neighbour, 400))
            spoil(faulty, before, lambda word: NOT_A_NUMBER)
        with pytest.raises(ServerError) as ended:
            await answer
        assert ended.value.reason == "NONFINITE_LOGITS"
        assert await beside == expected_neighbour
        again = await baton.complete(first, max_tokens=24, ignore_eos=True, cache_salt="spoilt")
    assert list(again.choices[0].token_ids) == expected
