"""Blocks of another worker's cache, pulled into ours where that is faster than computing them.

What the other worker has in files, and not in memory, it loads first where the router has found that worthwhile.
A fetch can fail, or take too long, and then the prompt is computed as if there had been none. The blocks that it took
are given back when the copy into them has ended, which may be later than the prompt waits for it.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from baton.engine.runner.loop import EngineLoop
from baton.engine.runner.thread import EngineStopped
from baton.engine.scheduler.batch import IncomingPrefix
from baton.text.kv_loading import FIXED_S as LOAD_FIXED_S
from baton.worker.transfer.peers import PeerFailed, Peers
from baton.worker.transfer.reader import Pull, TransferFailed, TransferReader

logger = logging.getLogger(__name__)

DECAY = 0.95  # weight of a step against the one after it: about the last 20 count
FIXED_S = {"shared_memory": 0.004, "grpc": 0.009}
"""The fixed time of a fetch, by transport: its calls, and turns on the threads of both engines. Figures:
lab/benchmarks/results/fetch_break_even-tableqa.json.
"""
LATE_LOADS = 2.0
"""So many times as long as the router expects may the other worker load from files, beside the time of a fetch."""
LONGEST_LOAD_S = 20.0
AVOIDED_S = 5.0  # a worker that a fetch failed on is left alone for so long


class PrefillRate:
    """Tokens per second that this worker computes: least squares through the origin, older steps counting less.

    So a step of few tokens, which takes hardly less time than one of many, weighs next to nothing.
    """

    def __init__(self) -> None:
        self._tokens_squared = 0.0
        self._tokens_seconds = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        self._tokens_squared = DECAY * self._tokens_squared + tokens * tokens
        self._tokens_seconds = DECAY * self._tokens_seconds + tokens * seconds

    @property
    def tokens_per_s(self) -> float | None:
        """None before the first step."""
        return self._tokens_squared / self._tokens_seconds if self._tokens_seconds > 0.0 else None


@dataclass(frozen=True, slots=True)
class FetchCosts:
    """The known costs when a prompt with a hint arrives."""

    block_tokens: int
    block_bytes: int  # of so many tokens, in all layers
    prefill_tokens_per_s: float | None  # None: nothing was computed yet, and a first prompt is slow
    transport: str
    link_bytes_per_s: float
    loaded_blocks: int = 0  # that the other worker loads from files first, at most
    load_bytes_per_s: float = 0.0  # at this rate

    def fetch_s(self, blocks: int) -> float:
        fixed_s = FIXED_S.get(self.transport, max(FIXED_S.values()))
        return fixed_s + blocks * self.block_bytes / self.link_bytes_per_s + self._load_s(blocks)

    def _load_s(self, blocks: int) -> float:
        loaded_blocks = min(blocks, self.loaded_blocks)
        if not loaded_blocks or self.load_bytes_per_s <= 0.0:
            return 0.0
        return LOAD_FIXED_S + loaded_blocks * self.block_bytes / self.load_bytes_per_s

    def compute_s(self, blocks: int) -> float | None:
        rate = self.prefill_tokens_per_s
        return None if rate is None else blocks * self.block_tokens / rate

    def favour_fetching(self, blocks: int) -> bool:
        """Whether that many blocks are fetched sooner than computed."""
        compute_s = self.compute_s(blocks)
        return compute_s is None or self.fetch_s(blocks) < compute_s


@dataclass(frozen=True, slots=True)
class FetchHint:
    """Where the router believes more of a prompt's blocks to be."""

    endpoint: str
    transfer_id: bytes
    blocks: int  # of the prompt, from its first on
    loaded_blocks: int = 0  # of those, the last ones: in files there, to be loaded first
    load_bytes_per_s: float = 0.0  # as far as the router knows


@dataclass(frozen=True, slots=True)
class Fetched:
    """The result of a fetch, which may be nothing."""

    duration_ms: float
    tokens: int = 0  # put into the prefix cache
    bytes: int = 0
    transport: str = ""


NOTHING_FETCHED = Fetched(0.0)


@dataclass(frozen=True, slots=True)
class FetchOptions:
    block_tokens: int
    block_bytes: int
    timeout_s: float  # longest that a prompt waits
    always: bool = False  # also where computing seems cheaper


def longest_wait_s(hint: FetchHint, options: FetchOptions) -> float:
    """So long a prompt waits for its blocks."""
    rate = hint.load_bytes_per_s
    load_s = hint.loaded_blocks * options.block_bytes / rate if rate > 0.0 else 0.0
    return options.timeout_s + min(LONGEST_LOAD_S, LATE_LOADS * load_s)


class PrefixFetcher:
    """Fetches blocks of other workers for prompts that come with a hint. Lives on the event loop."""

    def __init__(self, loop: EngineLoop, peers: Peers, rate: PrefillRate, options: FetchOptions) -> None:
        self._loop = loop
        self._peers = peers
        self.reader = TransferReader(peers)
        self._rate = rate
        self._options = options
        self._pulls: set[asyncio.Task[Pull]] = set()
        self._avoided_until: dict[str, float] = {}  # by endpoint, monotonic seconds

    async def fetch(self, hint: FetchHint, hashes: Sequence[bytes]) -> Fetched:
        """Fetches the blocks of `hashes` that are missing here, those that the prompt could take from the cache.

        Bounded but for the wait for our own engine, which the prompt would wait for too. Raises nothing of its own; may
        be cancelled.
        """
        began = time.monotonic()
        if self._avoided_until.get(hint.endpoint, began) > began:
            return NOTHING_FETCHED
        tokens, pull = 0, None
        try:
            incoming = await self._take_pages(hint, hashes[: hint.blocks])
            if incoming is not None:
                pull = await self._pull(hint, incoming)
                tokens = incoming.new_columns(pull.blocks) * self._options.block_tokens
        except TimeoutError:
            self._avoid(hint.endpoint, f"it took longer than {longest_wait_s(hint, self._options):g} s")
        except (PeerFailed, TransferFailed, EngineStopped) as error:
            self._avoid(hint.endpoint, str(error))
        except Exception as fault:  # another process's description: the prompt is computed as if there were none
            logger.exception("fetching a prefix failed: %s", hint.endpoint)
            self._avoid(hint.endpoint, f"{type(fault).__name__}: {fault}")
        duration_ms = (time.monotonic() - began) * 1e3
        if pull is None or tokens == 0:
            return Fetched(duration_ms)
        return Fetched(duration_ms, tokens, pull.bytes, pull.transport)

    async def close(self) -> None:
        """Waits for the copies that are under way, bounded by the transports."""
        for pull in self._pulls:
            pull.cancel()
        await asyncio.gather(*self._pulls, return_exceptions=True)
        await self.reader.close()

    async def _take_pages(self, hint: FetchHint, hashes: Sequence[bytes]) -> IncomingPrefix | None:
        """Takes blocks for those missing, if fetching is worth it. Raises: PeerFailed, EngineStopped, TimeoutError."""
        async with asyncio.timeout(self._options.timeout_s):
            peer = await self._peers.borrow(hint.endpoint)  # pairs with it, the first time
        self._peers.give_back(peer)
        worthwhile = self._worthwhile(hint, peer.transport.name, peer.rate.gb_per_s * 1e9)
        asked = self._loop.begin_fetch(hashes, worthwhile)
        try:
            return await asyncio.wrap_future(asked)
        except asyncio.CancelledError:
            asked.add_done_callback(self._give_back)  # the engine may have taken them already
            raise

    def _worthwhile(self, hint: FetchHint, transport: str, link_bytes_per_s: float) -> Callable[[int], bool]:
        options, rate = self._options, self._rate.tokens_per_s
        costs = FetchCosts(
            options.block_tokens,
            options.block_bytes,
            rate,
            transport,
            link_bytes_per_s,
            hint.loaded_blocks,
            hint.load_bytes_per_s,
        )
        return lambda blocks: options.always or costs.favour_fetching(blocks)

    def _give_back(self, asked: "Future[IncomingPrefix | None]") -> None:
        incoming = None if asked.cancelled() or asked.exception() else asked.result()
        if incoming is not None:
            self._loop.end_fetch(incoming, 0)

    async def _pull(self, hint: FetchHint, incoming: IncomingPrefix) -> Pull:
        """Raises: TransferFailed, TimeoutError. The blocks go back when the copy has ended."""
        restore = hint.loaded_blocks > 0
        pulling = self.reader.pull(hint.endpoint, hint.transfer_id, incoming, incoming.hashes, restore=restore)
        pull = asyncio.create_task(pulling, name="fetch")
        self._pulls.add(pull)
        pull.add_done_callback(partial(self._on_pulled, incoming))
        try:
            await asyncio.wait({pull}, timeout=longest_wait_s(hint, self._options))
        finally:
            if not pull.done():
                pull.cancel()
        if not pull.done():
            raise TimeoutError
        return pull.result()

    def _on_pulled(self, incoming: IncomingPrefix, pull: "asyncio.Task[Pull]") -> None:
        """However it ended, no copy runs any more. Called before its waiter continues."""
        self._pulls.discard(pull)
        valid = not pull.cancelled() and pull.exception() is None
        self._loop.end_fetch(incoming, pull.result().blocks if valid else 0)

    def _avoid(self, endpoint: str, why: str) -> None:
        logger.info("fetching a prefix from %s failed, it is computed instead: %s", endpoint, why)
        now = time.monotonic()
        self._avoided_until = {other: until for other, until in self._avoided_until.items() if until > now}
        self._avoided_until[endpoint] = now + AVOIDED_S
