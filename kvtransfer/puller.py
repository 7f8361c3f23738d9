"""The one thread that copies KV into our pool, kept off the core that decodes."""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from baton.kvtransfer.checksum import BlockChecksum, Checksums
from baton.kvtransfer.transport import BlockPair, ChecksumDiffers, CopyStuck, LinkRate, Transport

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class CopyResult:
    bytes: int
    seconds: float  # on the thread, without the wait for it

    @property
    def gb_per_s(self) -> float:
        return self.bytes / 1e9 / self.seconds if self.seconds > 0 else 0.0


class PullThread:
    """Copies one after another, first come first served. `cores`: where the thread may run; None: anywhere."""

    def __init__(
        self,
        cores: frozenset[int] | None,
        on_stuck: Callable[[CopyStuck], None] = lambda stuck: None,
        device: torch.device | None = None,
    ) -> None:
        """Start the thread. `device`: of the pool. `on_stuck` is called on the thread for a copy that a device does not
        end: until it returns, the copy's blocks are not reused. Raises: ValueError if the thread cannot run on
        exactly these cores.
        """
        self._on_stuck = on_stuck
        begin = None if device is None or device.type == "cpu" else partial(_make_current, device.index or 0)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-pull", initializer=begin)
        if cores is not None:
            try:
                self._executor.submit(_pin_this_thread, cores).result()
            except ValueError:
                self._executor.shutdown()
                raise

    async def copy(self, transport: Transport, transfer_id: bytes, pairs: Sequence[BlockPair]) -> CopyResult:
        """Copy blocks. Raises: TransferError.

        When cancelled, it ends only after the copy has: until then its destination blocks may not be given to others.
        """
        return await self._run(lambda: _timed_copy(transport, transfer_id, pairs))

    async def check(self, own: Checksums, wanted: Sequence[BlockChecksum]) -> None:
        """Check that blocks of our own have these checksums; `logical` is their position in our pool. Raises:
        ChecksumDiffers.
        """
        await self._run(lambda: _compare(own, wanted))

    async def compare(self, compare: Callable[[], None]) -> None:
        """Run `compare` on the thread and raise what it raises."""
        await self._run(compare)

    async def measure(self, transport: Transport, nbytes: int) -> LinkRate:
        """The rate of a link as copies will see it: on this thread. Raises TransferError."""
        return await self._run(lambda: transport.measure(nbytes))

    def close(self) -> None:
        """Waits for the copy that is running; those that have not begun are cancelled."""
        self._executor.shutdown(cancel_futures=True)

    async def _run(self, work: Callable[[], Result]) -> Result:
        job = self._executor.submit(self._work, work)
        ended = asyncio.wrap_future(job)
        try:
            return await asyncio.shield(ended)
        except asyncio.CancelledError:
            job.cancel()  # helps only while it has not begun
            await _wait_out(ended)
            raise

    def _work(self, work: Callable[[], Result]) -> Result:
        try:
            return work()
        except CopyStuck as stuck:
            self._on_stuck(stuck)
            raise


async def _wait_out(ended: asyncio.Future[Result]) -> None:
    """Holds out against further cancels. As long as a copy takes: transports bound their own waiting."""
    while not ended.done():
        try:
            await asyncio.wait([ended])
        except asyncio.CancelledError:
            continue
    if not ended.cancelled():
        ended.exception()  # no caller awaits it: it must not be logged as never retrieved


def _timed_copy(transport: Transport, transfer_id: bytes, pairs: Sequence[BlockPair]) -> CopyResult:
    started = time.monotonic()
    copied = transport.copy(transfer_id, pairs)
    return CopyResult(copied, time.monotonic() - started)


def _compare(own: Checksums, wanted: Sequence[BlockChecksum]) -> None:
    for block, value in wanted:
        found = own.of(block)
        if found != value:
            raise ChecksumDiffers(f"a block's checksum is {found:016x}, its source had {value:016x}")


def _make_current(device_index: int) -> None:
    """UCX, below NIXL, takes the CUDA context that is current on its thread, where there may be none."""
    torch.cuda.set_device(device_index)
    torch.cuda.current_stream().synchronize()  # the first GPU counts as set already: this makes its context current


def _pin_this_thread(cores: frozenset[int]) -> None:
    try:
        os.sched_setaffinity(0, cores)
    except (OSError, OverflowError, ValueError) as error:
        raise ValueError(f"the copying thread cannot run on cores {sorted(cores)}: {error}") from error
    if os.sched_getaffinity(0) != cores:
        raise ValueError(f"of cores {sorted(cores)} only {sorted(os.sched_getaffinity(0))} are there")
