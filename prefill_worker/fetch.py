"""Fetches cached blocks of prompts from other workers, if that is faster than computing them.

The other worker first loads blocks that it has only in files, if the router found that worthwhile. If a fetch fails or
times out, the prompt is computed. Destination blocks are released when the copy into them has finished, which may be
after the prompt has stopped waiting.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from baton.engine.runner.loop import EngineLoop
from baton.engine.runner.thread import EngineStopped
from baton.engine.scheduler.batch import IncomingPrefix
from baton.text.kv_loading import FIXED_S as LOAD_FIXED_S
from baton.worker.late_results import result_or_release
from baton.worker.transfer.peers import PeerFailed, Peers
from baton.worker.transfer.reader import Pull, TransferFailed, TransferReader

logger = logging.getLogger(__name__)

DECAY = 0.95  # weight of a step relative to the step after it: about the last 20 steps count
FIXED_S = {"shared_memory": 0.004, "grpc": 0.009}
"""Measured fixed cost of a fetch in seconds, by transport: the calls and the waits for both engines."""
LATE_LOADS = 2.0
"""Longest wait for the other worker's load from files, as a multiple of the time that the router expects."""
LONGEST_LOAD_S = 20.0
AVOIDED_S = 5.0  # time for which nothing is fetched from a worker after a failed fetch


class PrefillRate:
    """Prompt tokens per second of this worker, by least squares through the origin. Older steps weigh less.

    Steps with few tokens have almost no weight, because most of their time is a fixed cost.
    """

    def __init__(self) -> None:
        self._tokens_squared = 0.0
        self._tokens_seconds = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        self._tokens_squared = DECAY * self._tokens_squared + tokens * tokens
        self._tokens_seconds = DECAY * self._tokens_seconds + tokens * seconds

    @property
    def tokens_per_s(self) -> float | None:
        """Measured prompt rate; None before the first step."""
        return self._tokens_squared / self._tokens_seconds if self._tokens_seconds > 0.0 else None


@dataclass(frozen=True, slots=True)
class FetchCosts:
    """Measurements from which the times of fetching and of computing a prompt's blocks are estimated."""

    block_tokens: int
    block_bytes: int  # size of a block over all layers
    prefill_tokens_per_s: float | None  # this worker's prompt rate; None: not measured
    transport: str
    link_bytes_per_s: float
    loaded_blocks: int = 0  # number of the prompt's blocks that the other worker must first load from files
    load_bytes_per_s: float = 0.0  # the other worker's rate of loads from files; 0: unknown

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
        """Return whether fetching `blocks` blocks is faster than computing them."""
        compute_s = self.compute_s(blocks)
        return compute_s is None or self.fetch_s(blocks) < compute_s


@dataclass(frozen=True, slots=True)
class FetchHint:
    """The router's hint that another worker has more of a prompt's blocks."""

    endpoint: str
    transfer_id: bytes
    blocks: int  # number of leading blocks of the prompt that the worker has
    loaded_blocks: int = 0  # number of blocks at the end of the prefix that the worker has only in files
    load_bytes_per_s: float = 0.0  # rate at which the worker loads files; 0: unknown


@dataclass(frozen=True, slots=True)
class Fetched:
    """Result of a fetch, with zero tokens if nothing was fetched."""

    duration_ms: float
    tokens: int = 0  # tokens added to the prefix cache
    bytes: int = 0
    transport: str = ""


NOTHING_FETCHED = Fetched(0.0)


@dataclass(frozen=True, slots=True)
class FetchOptions:
    block_tokens: int
    block_bytes: int
    timeout_s: float  # longest wait of a prompt for a fetch, without loads from files
    always: bool = False  # fetch even if computing seems faster


def longest_wait_s(hint: FetchHint, options: FetchOptions) -> float:
    """Return the longest wait of a prompt for its blocks, in seconds."""
    rate = hint.load_bytes_per_s
    load_s = hint.loaded_blocks * options.block_bytes / rate if rate > 0.0 else 0.0
    return options.timeout_s + min(LONGEST_LOAD_S, LATE_LOADS * load_s)


class PrefixFetcher:
    """Fetches blocks from other workers for prompts with a hint. Use it only on the event loop."""

    def __init__(self, loop: EngineLoop, peers: Peers, rate: PrefillRate, options: FetchOptions) -> None:
        self._loop = loop
        self._peers = peers
        self.reader = TransferReader(peers)
        self._rate = rate
        self._options = options
        self._pulls: set[asyncio.Task[Pull]] = set()
        self._avoided_until: dict[str, float] = {}  # endpoint: monotonic time before which nothing is fetched from it

    async def fetch(self, hint: FetchHint, hashes: Sequence[bytes]) -> Fetched:
        """Fetch the blocks of `hashes` that are not cached here.

        All waits are bounded, except the wait for this worker's engine, which the prompt needs in any case. Failures
        are logged and not raised. The call may be cancelled.
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
            self._avoid(hint.endpoint, f"timeout after {longest_wait_s(hint, self._options):g} s")
        except (PeerFailed, TransferFailed, EngineStopped) as error:
            self._avoid(hint.endpoint, str(error))
        except Exception as fault:  # another process's data may cause any error: the prompt is computed instead
            logger.exception("prefix fetch from %s failed unexpectedly; computing the prompt instead", hint.endpoint)
            self._avoid(hint.endpoint, f"{type(fault).__name__}: {fault}")
        duration_ms = (time.monotonic() - began) * 1e3
        if pull is None or tokens == 0:
            return Fetched(duration_ms)
        return Fetched(duration_ms, tokens, pull.bytes, pull.transport)

    async def close(self) -> None:
        """Cancel fetches and wait for running copies, whose time the transports bound."""
        for pull in self._pulls:
            pull.cancel()
        await asyncio.gather(*self._pulls, return_exceptions=True)
        await self.reader.close()

    async def _take_pages(self, hint: FetchHint, hashes: Sequence[bytes]) -> IncomingPrefix | None:
        """Allocate destination blocks if the fetch is worthwhile. Raises: PeerFailed, EngineStopped, TimeoutError."""
        async with asyncio.timeout(self._options.timeout_s):
            peer = await self._peers.borrow(hint.endpoint)  # the first call connects the two workers
        self._peers.give_back(peer)
        worthwhile = self._worthwhile(hint, peer.transport.name, peer.rate.gb_per_s * 1e9)
        return await result_or_release(self._loop.begin_fetch(hashes, worthwhile), self._release)

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

    def _release(self, incoming: IncomingPrefix | None) -> None:
        if incoming is not None:
            self._loop.end_fetch(incoming, 0)

    async def _pull(self, hint: FetchHint, incoming: IncomingPrefix) -> Pull:
        """Pull blocks. After a failure or timeout, the destination blocks are released when the copy has finished.

        Raises: TransferFailed, TimeoutError.
        """
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
        """Add the blocks of a finished pull to the prefix cache, or release them. Runs before the prompt continues."""
        self._pulls.discard(pull)
        valid = not pull.cancelled() and pull.exception() is None
        self._loop.end_fetch(incoming, pull.result().blocks if valid else 0)

    def _avoid(self, endpoint: str, why: str) -> None:
        logger.info("prefix fetch failed: %s: %s; computing the prompt instead", endpoint, why)
        now = time.monotonic()
        self._avoided_until = {other: until for other, until in self._avoided_until.items() if until > now}
        self._avoided_until[endpoint] = now + AVOIDED_S
