"""Thread that copies KV into this worker's pool, on other CPU cores than those that compute."""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch

from baton.kvtransfer.checksum import BlockChecksum, Checksums
from baton.kvtransfer.transport import BlockPair, ChecksumDiffers, CopyStuck, LinkRate, Transport

Result = TypeVar("Result")


class PullThread:
    """Thread that copies KV, one transfer after another. `cores`: CPU cores on which it may run; None: any."""

    def __init__(
        self,
        cores: frozenset[int] | None,
        on_stuck: Callable[[CopyStuck], None] = lambda stuck: None,
        device: torch.device | None = None,
    ) -> None:
        """Start the thread. `device`: device of the pool.

        If a device does not finish a copy, the thread calls `on_stuck`. The copy's blocks are not reused until
        `on_stuck` has returned. Raises: ValueError if the thread cannot run on exactly these cores.
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

    async def copy(self, transport: Transport, transfer_id: bytes, pairs: Sequence[BlockPair]) -> LinkRate:
        """Copy blocks; return their bytes and how long the copy took, without the time in the queue.

        A cancelled call returns only after the copy has finished, because the destination blocks must not be reassigned
        during the copy. Raises: TransferError.
        """
        return await self._run(lambda: _timed_copy(transport, transfer_id, pairs))

    async def check(self, own: Checksums, wanted: Sequence[BlockChecksum]) -> None:
        """Compare checksums of this pool's blocks with `wanted`, where `logical` means the block's index in this pool.

        Raises: ChecksumDiffers.
        """
        await self._run(lambda: _compare(own, wanted))

    async def compare(self, compare: Callable[[], None]) -> None:
        """Run `compare` on the thread, after the queued copies. Raises: exceptions of `compare`."""
        await self._run(compare)

    async def measure(self, transport: Transport, nbytes: int) -> LinkRate:
        """Measure a transport's rate on the thread that copies. Raises: TransferError."""
        return await self._run(lambda: transport.measure(nbytes))

    def close(self) -> None:
        """Cancel queued copies and wait for the running one."""
        self._executor.shutdown(cancel_futures=True)

    async def _run(self, work: Callable[[], Result]) -> Result:
        job = self._executor.submit(self._work, work)
        ended = asyncio.wrap_future(job)
        try:
            return await asyncio.shield(ended)
        except asyncio.CancelledError:
            job.cancel()  # has an effect only if the job has not begun
            await _wait_out(ended)
            raise

    def _work(self, work: Callable[[], Result]) -> Result:
        try:
            return work()
        except CopyStuck as stuck:
            self._on_stuck(stuck)
            raise


async def _wait_out(ended: asyncio.Future[Result]) -> None:
    """Wait for `ended`, even if this task is cancelled again. The wait is bounded, since transports bound each copy."""
    while not ended.done():
        try:
            await asyncio.wait([ended])
        except asyncio.CancelledError:
            continue
    if not ended.cancelled():
        ended.exception()  # marks the exception as retrieved: no caller awaits it


def _timed_copy(transport: Transport, transfer_id: bytes, pairs: Sequence[BlockPair]) -> LinkRate:
    started = time.monotonic()
    copied = transport.copy(transfer_id, pairs)
    return LinkRate(copied, time.monotonic() - started)


def _compare(own: Checksums, wanted: Sequence[BlockChecksum]) -> None:
    for block, value in wanted:
        found = own.of(block)
        if found != value:
            raise ChecksumDiffers(f"copied block {block} has checksum {found:016x}, but at the source {value:016x}")


def _make_current(device_index: int) -> None:
    """Make the device's CUDA context current on this thread, because UCX (for NIXL) uses the current context."""
    torch.cuda.set_device(device_index)
    torch.cuda.current_stream().synchronize()  # creates the context, which set_device does not do for device 0


def _pin_this_thread(cores: frozenset[int]) -> None:
    try:
        os.sched_setaffinity(0, cores)
    except (OSError, OverflowError, ValueError) as error:
        raise ValueError(
            f"--transfer-cores: the copying thread cannot run on cores {sorted(cores)}: {error}"
        ) from error
    if os.sched_getaffinity(0) != cores:
        raise ValueError(f"--transfer-cores: of {sorted(cores)} only {sorted(os.sched_getaffinity(0))} are available")
