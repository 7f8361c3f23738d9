"""Hand-over of user sessions: a draining worker offers their KV, and other workers pull it.

The draining worker sends offers to a router, which tells another worker to pull the blocks (`TransferReader.pull`).
Only the exit of the draining process waits for the pulls, for MOST_S at most.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from baton.engine.kv_cache.sessions import KeptBlocks, SessionTurn
from baton.engine.runner.loop import EngineLoop
from baton.engine.runner.thread import EngineStopped
from baton.engine.scheduler.batch import IncomingPrefix
from baton.worker.late_results import result_or_release
from baton.worker.transfer.peers import PeerFailed
from baton.worker.transfer.reader import TransferFailed, TransferReader

logger = logging.getLogger(__name__)
MOST_WAITING = 256  # maximum number of queued sessions
PULL_TIMEOUT_S = 5.0
QUIET_S = 1.0  # time without readers after which the hand-over is complete
POLL_S = 0.05
MOST_S = 20.0  # longest hand-over; a drain lasts at most 30 s by default


class BlockTaker:
    """Puller of sessions that other workers hand over, one after another. Lives on the event loop."""

    def __init__(self, loop: EngineLoop, reader: TransferReader) -> None:
        self._loop = loop
        self._reader = reader
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self.taken_blocks = 0
        """Number of blocks pulled since the start."""

    def take(self, endpoint: str, transfer_id: bytes, hashes: Sequence[bytes], turn: SessionTurn) -> None:
        """Begin to pull a session. Failures are logged, not raised."""
        if len(self._tasks) >= MOST_WAITING:
            logger.info("session of %s not taken over: %d sessions are queued already", endpoint, MOST_WAITING)
            return
        task = asyncio.create_task(self._take(endpoint, transfer_id, hashes, turn), name="take over")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel all pulls and wait for the running copy, whose transport has a timeout."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._reader.close()

    async def _take(self, endpoint: str, transfer_id: bytes, hashes: Sequence[bytes], turn: SessionTurn) -> None:
        async with self._turn:
            try:
                asked = self._loop.begin_take_over(hashes)
                incoming = await result_or_release(asked, lambda late: self._release(late, turn))
            except EngineStopped:
                return
            if incoming is not None:
                await self._pull(endpoint, transfer_id, incoming, turn)

    async def _pull(self, endpoint: str, transfer_id: bytes, incoming: IncomingPrefix, turn: SessionTurn) -> None:
        blocks = 0
        try:
            async with asyncio.timeout(PULL_TIMEOUT_S):  # may take longer, since a cancelled pull waits for its copy
                pull = await self._reader.pull(endpoint, transfer_id, incoming, incoming.hashes)
            blocks = pull.blocks
            self.taken_blocks += max(0, blocks - incoming.cached_blocks)
        except TimeoutError:
            logger.info("session of %s not taken over: timeout after %g s", endpoint, PULL_TIMEOUT_S)
        except (PeerFailed, TransferFailed) as error:
            logger.info("session of %s not taken over: %s", endpoint, error)
        finally:
            self._loop.end_take_over(incoming, blocks, turn)

    def _release(self, incoming: IncomingPrefix | None, turn: SessionTurn) -> None:
        if incoming is not None:
            self._loop.end_take_over(incoming, 0, turn)


@dataclass(frozen=True, slots=True)
class Leaving:
    """Functions of a draining worker that `hand_over` calls."""

    kept: Callable[[], "Future[list[KeptBlocks]]"]
    offer: Callable[[KeptBlocks], bool]  # sends an offer to a router; False: no router is connected
    has_requests: Callable[[], bool]
    has_readers: Callable[[], bool]  # whether cached blocks are being read


async def hand_over(leaving: Leaving) -> None:
    """Offer sessions now, and newer ones after the last request; then wait while other workers read blocks.

    Takes MOST_S at most. Raises no errors of its own.
    """
    offered: set[bytes] = set()
    try:
        async with asyncio.timeout(MOST_S):
            await _offer(leaving, offered)
            while leaving.has_requests():  # noqa: ASYNC110 -- the request table has no event
                await asyncio.sleep(POLL_S)
            await _offer(leaving, offered)
            quiet_since = time.monotonic()
            while offered and time.monotonic() - quiet_since < QUIET_S:
                await asyncio.sleep(POLL_S)
                if leaving.has_readers():
                    quiet_since = time.monotonic()
    except TimeoutError:
        logger.info("hand-over of sessions stopped: timeout after %g s; other workers recompute the rest", MOST_S)
    except EngineStopped as error:
        logger.info("hand-over of sessions stopped: %s", error)


async def _offer(leaving: Leaving, offered: set[bytes]) -> None:
    """Offer sessions that were not offered yet. Raises: EngineStopped."""
    kept = await asyncio.wrap_future(leaving.kept())
    for each in kept:
        if each.session_id not in offered and leaving.offer(each):
            offered.add(each.session_id)
