"""Thread that copies KV into this worker's pool, off the cores that compute."""

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
    """Executor of copies on one thread, in order of arrival. `cores`: CPU cores of the thread; None: any."""

    def __init__(
        self,
        cores: frozenset[int] | None,
        on_stuck: Callable[[CopyStuck], None] = lambda stuck: None,
        device: torch.device | None = None,
    ) -> None:
        """Start the thread. `device`: device of the pool. `on_stuck` is called on the thread for a copy that its device
        does not finish: until it returns, the copy's blocks are not reused. Raises: ValueError if the thread cannot run
        on exactly these cores.
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
        """Copy blocks; return their bytes and the time on the thread. Raises: TransferError.

        If cancelled, it returns only after the copy has finished: until then the destination blocks must not be
        reassigned.
        """
        return await self._run(lambda: _timed_copy(transport, transfer_id, pairs))

    async def check(self, own: Checksums, wanted: Sequence[BlockChecksum]) -> None:
        """Compare checksums of own blocks; `logical` is the block's index in this pool. Raises: ChecksumDiffers."""
        await self._run(lambda: _compare(own, wanted))

    async def compare(self, compare: Callable[[], None]) -> None:
        """Run `compare` on the thread and raise its exceptions."""
        await self._run(compare)

    async def measure(self, transport: Transport, nbytes: int) -> LinkRate:
        """Measure a link on the thread that copies. Raises: TransferError."""
        return await self._run(lambda: transport.measure(nbytes))

    def close(self) -> None:
        """Wait for the running copy; queued ones are cancelled."""
        self._executor.shutdown(cancel_futures=True)

    async def _run(self, work: Callable[[], Result]) -> Result:
        job = self._executor.submit(self._work, work)
        ended = asyncio.wrap_future(job)
        try:
            return await asyncio.shield(ended)
        except asyncio.CancelledError:
            job.cancel()  # effective only before it has begun
            await _wait_out(ended)
            raise

    def _work(self, work: Callable[[], Result]) -> Result:
        try:
            return work()
        except CopyStuck as stuck:
            self._on_stuck(stuck)
            raise


async def _wait_out(ended: asyncio.Future[Result]) -> None:
    """Wait despite further cancellations. Transports bound the time of a copy."""
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
            raise ChecksumDiffers(f"checksum of a block is {found:016x}, its source's is {value:016x}")


def _make_current(device_index: int) -> None:
    """Make the device's CUDA context current on this thread: UCX, below NIXL, uses the current one."""
    torch.cuda.set_device(device_index)
    torch.cuda.current_stream().synchronize()  # forces initialisation: set_device does nothing for device 0


def _pin_this_thread(cores: frozenset[int]) -> None:
    try:
        os.sched_setaffinity(0, cores)
    except (OSError, OverflowError, ValueError) as error:
        raise ValueError(
            f"--transfer-cores: the copying thread cannot run on cores {sorted(cores)}: {error}"
        ) from error
    if os.sched_getaffinity(0) != cores:
        raise ValueError(f"--transfer-cores: of {sorted(cores)} only {sorted(os.sched_getaffinity(0))} are available")
