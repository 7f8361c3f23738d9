"""Bits of KV that turn over between a prefill worker and whoever reads it: every block that is being read is hit.

Prompts are asked for; a moment later decode workers, which have opened them by then, stand still while they are
computed. Then the source stands still too, and a bit in each page of its pool is turned over through its own map (no
other may write it). The readers go on, and copy what is wrong. Before the source goes on, its memory is as it was:
nothing but what was on its way has changed.
"""

import asyncio
import random
import signal
import time
from collections.abc import Callable

from chaos.injection import NotMade, NotProven, shown
from chaos.procfs import Life, is_alive, pool_range, read_memory, state_of, write_memory
from chaos.stack import Stack

TRIES = 25  # about three in four find that nobody had something left to read, and show nothing
PROMPTS = 8  # that are asked for in each try
OPENED_S = (0.02, 0.15)  # from asking until readers stand still: some have opened, not all is computed
UNREAD_S = 0.5  # that they stand still at most: routers give them up after 1.2 s
READ_S = 0.5  # that the source does
PAUSE_S = 0.2  # between tries
PAGE_BYTES = 4096
NOTICED_S = 0.8  # after a try: readers report five times a second
POLL_S = 0.02


class FlippedOnTheWay:
    """`target` is a prefill worker. Proved by the bytes that changed and by readers that found it out."""

    def __init__(
        self, stack: Stack, target: str, draw: random.Random, ask: Callable[[int], None] = lambda count: None
    ) -> None:
        self._stack = stack
        self._target = target
        self._draw = draw
        self._ask = ask
        self._flipped = 0
        self._differing = 0
        self._turned_over = False

    async def inject(self) -> None:
        """Until a reader was hit, some times. Raises: NotMade, NotProven."""
        before = await self._found_out()
        for _ in range(TRIES):
            await self._try()
            until_s = time.monotonic() + NOTICED_S
            while self._flipped and not self._differing and time.monotonic() < until_s:
                await asyncio.sleep(POLL_S)
                self._differing = max(0, await self._found_out() - before)
            if self._differing:
                return
            await asyncio.sleep(PAUSE_S)
        if not self._turned_over:
            raise NotMade("no prompt was on its way")

    async def prove(self) -> str:
        if not self._flipped:
            raise NotProven("no bit of what was on its way turned over")
        if not self._differing:
            raise NotProven(f"{self._flipped} bits were turned over, no reader found a checksum that differs")
        return f"{self._flipped} bits turned over, {self._differing} checksums differ"

    async def heal(self) -> None:
        """`inject` leaves nothing behind."""

    async def _try(self) -> None:
        source, readers = self._stack.life(self._target), self._readers()
        if source is None or not readers:
            raise NotMade(f"{self._target} or its readers are not running")
        self._ask(PROMPTS)
        await asyncio.sleep(self._draw.uniform(*OPENED_S))
        try:
            for reader in readers:
                self._stack.send(reader, signal.SIGSTOP)
            if await self._has_unread():
                self._stack.send(source, signal.SIGSTOP)
                await shown(lambda: state_of(source.pid) == "T", f"state T of {source.pid}")
                await self._turn_over_and_back(source, readers)
        except OSError as error:
            if is_alive(source):
                raise
            raise NotMade(f"another fault ended {self._target} meanwhile: {error}") from error
        finally:
            for life in (*readers, source):
                self._stack.send(life, signal.SIGCONT)

    async def _turn_over_and_back(self, source: Life, readers: list[Life]) -> None:
        pool = pool_range(source.pid)
        if pool is None:
            raise NotMade(f"pid {source.pid} has no pool")
        before = read_memory(source.pid, pool.start, len(pool))
        wrong = bytearray(before)
        place, bit = self._draw.randrange(PAGE_BYTES), 1 << self._draw.randrange(8)
        for at in range(place, len(wrong), PAGE_BYTES):
            wrong[at] ^= bit
        self._turned_over = True
        try:
            write_memory(source.pid, pool.start, bytes(wrong))
            read_back = read_memory(source.pid, pool.start, len(pool))
            self._flipped = sum(read_back[at] != before[at] for at in range(place, len(before), PAGE_BYTES))
            for reader in readers:
                self._stack.send(reader, signal.SIGCONT)
            await asyncio.sleep(READ_S)
        finally:
            write_memory(source.pid, pool.start, before)

    async def _has_unread(self) -> bool:
        """Whether the source has a prompt that nobody has taken, within the time that readers may stand still."""
        until_s = time.monotonic() + UNREAD_S
        while time.monotonic() < until_s:
            await asyncio.sleep(POLL_S)
            for status in await self._stack.statuses():
                for worker in status.workers if status else ():
                    load = worker.load if worker.worker_id == self._target else None
                    if load is not None and load.pages.held_by_transfers > 0:
                        return True
        return False

    async def _found_out(self) -> int:
        """Checksums that differed, by all readers, as the router knows that has heard most."""
        told = [
            sum(worker.load.checksum_mismatches for worker in status.workers if worker.load)
            for status in await self._stack.statuses()
            if status
        ]
        return max(told, default=0)

    def _readers(self) -> list[Life]:
        lives = [self._stack.life(place.name) for place in self._stack.workers if place.role == "decode"]
        return [life for life in lives if life is not None]
