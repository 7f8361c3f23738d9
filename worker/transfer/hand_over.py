"""Sessions outlive their worker: one that leaves offers what it keeps for them, and others take it over.

The worker that leaves offers them to a router, which has another worker fetch the blocks from here, as for any prompt
(`TransferReader.pull`). Nothing waits for it but the end of the process, which is bounded.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from baton.engine.kv_cache.sessions import KeptBlocks, SessionTurn
from baton.engine.runner.loop import EngineLoop
from baton.engine.runner.thread import EngineStopped
from baton.engine.scheduler.batch import IncomingPrefix
from baton.worker.transfer.peers import PeerFailed
from baton.worker.transfer.reader import TransferFailed, TransferReader

logger = logging.getLogger(__name__)
MOST_WAITING = 256  # queued sessions to take over
PULL_TIMEOUT_S = 5.0
QUIET_S = 1.0  # time without readers after which none is expected
POLL_S = 0.05
MOST_S = 20.0  # of the 30 s of a drain


class BlockTaker:
    """Takes over sessions of other workers, one after another. Lives on the event loop."""

    def __init__(self, loop: EngineLoop, reader: TransferReader) -> None:
        self._loop = loop
        self._reader = reader
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self.taken_blocks = 0
        """Blocks taken over since the start."""

    def take(self, endpoint: str, transfer_id: bytes, hashes: Sequence[bytes], turn: SessionTurn) -> None:
        """Begin to take over a session. Failures are logged."""
        if len(self._tasks) >= MOST_WAITING:
            logger.info("session of %s not taken over: %d others wait", endpoint, MOST_WAITING)
            return
        task = asyncio.create_task(self._take(endpoint, transfer_id, hashes, turn), name="take over")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel take-overs and wait for the running copy, bounded by the transports."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._reader.close()

    async def _take(self, endpoint: str, transfer_id: bytes, hashes: Sequence[bytes], turn: SessionTurn) -> None:
        async with self._turn:
            try:
                asked = self._loop.begin_take_over(hashes)
                incoming = await _result(self._loop, asked, turn)
            except EngineStopped:
                return
            if incoming is not None:
                await self._pull(endpoint, transfer_id, incoming, turn)

    async def _pull(self, endpoint: str, transfer_id: bytes, incoming: IncomingPrefix, turn: SessionTurn) -> None:
        blocks = 0
        try:
            async with asyncio.timeout(PULL_TIMEOUT_S):  # a pull that is cancelled waits for its copy
                pull = await self._reader.pull(endpoint, transfer_id, incoming, incoming.hashes)
            blocks = pull.blocks
            self.taken_blocks += max(0, blocks - incoming.cached_blocks)
        except TimeoutError:
            logger.info("session of %s not taken over: timeout after %g s", endpoint, PULL_TIMEOUT_S)
        except (PeerFailed, TransferFailed) as error:
            logger.info("session of %s not taken over: %s", endpoint, error)
        finally:
            self._loop.end_take_over(incoming, blocks, turn)


async def _result(loop: EngineLoop, asked: "Future[IncomingPrefix | None]", turn: SessionTurn) -> IncomingPrefix | None:
    """Return the prefix to take over. May be cancelled: blocks that the engine reserved are released. Raises:
    EngineStopped.
    """
    try:
        return await asyncio.wrap_future(asked)
    except asyncio.CancelledError:
        asked.add_done_callback(partial(_give_back, loop, turn))
        raise


def _give_back(loop: EngineLoop, turn: SessionTurn, asked: "Future[IncomingPrefix | None]") -> None:
    incoming = None if asked.cancelled() or asked.exception() else asked.result()
    if incoming is not None:
        loop.end_take_over(incoming, 0, turn)


@dataclass(frozen=True, slots=True)
class Leaving:
    """Interface of a draining worker to the hand-over of its sessions."""

    kept: Callable[[], "Future[list[KeptBlocks]]"]
    offer: Callable[[KeptBlocks], bool]  # to a router; False: none is there
    has_requests: Callable[[], bool]
    has_readers: Callable[[], bool]  # of cached blocks


async def hand_over(leaving: Leaving) -> None:
    """Offer sessions now and again after the last request; then wait while others read.

    Bounded by MOST_S. Raises nothing of its own.
    """
    offered: set[bytes] = set()
    try:
        async with asyncio.timeout(MOST_S):
            await _offer(leaving, offered)
            while leaving.has_requests():  # noqa: ASYNC110 -- the table has no event
                await asyncio.sleep(POLL_S)
            await _offer(leaving, offered)
            quiet_since = time.monotonic()
            while offered and time.monotonic() - quiet_since < QUIET_S:
                await asyncio.sleep(POLL_S)
                if leaving.has_readers():
                    quiet_since = time.monotonic()
    except TimeoutError:
        logger.info("hand-over of sessions stopped: timeout after %g s; the rest is recomputed elsewhere", MOST_S)
    except EngineStopped as error:
        logger.info("hand-over of sessions stopped: %s", error)


async def _offer(leaving: Leaving, offered: set[bytes]) -> None:
    """Offer blocks that were not offered yet. Raises: EngineStopped."""
    kept = await asyncio.wrap_future(leaving.kept())
    for each in kept:
        if each.session_id not in offered and leaving.offer(each):
            offered.add(each.session_id)
