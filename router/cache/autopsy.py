"""Reasons why blocks of a prompt were not in the cache of the worker that computed it.

The sources are the newest evictions of each worker (evictions.py), the blocks that other workers had at the placement,
and the hashes that salted blocks would have without the salt.

A block is evicted together with all blocks behind it. So the evicted blocks of a prompt directly follow its cached
blocks, and one lookup shows whether the prompt has evicted blocks.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import NamedTuple


class EvictedRun(NamedTuple):
    """Adjacent evicted blocks, with the ages of the newest and the oldest eviction."""

    blocks: int
    least_age_s: float
    most_age_s: float


SALT_BLOCKS = 128  # number of a prompt's first blocks that are hashed again without its salt, which takes 0.1 ms
MOST_SALTED_BLOCKS = 65_536  # maximum number of remembered blocks, 14 MB


class SaltedNames:
    """Map from a block's hash without a salt to its newest salted hash, for the newest prompts.

    Equal prompts under different salts have different hashes, and no tokens are kept to compare. So the first
    SALT_BLOCKS blocks of a completed prompt are hashed again without its salt, and the result finds the same prompt
    under other salts. If no request has a salt or an API key, nothing is computed.
    """

    def __init__(self, most_blocks: int = MOST_SALTED_BLOCKS) -> None:
        self._most_blocks = most_blocks
        self._salted: OrderedDict[bytes, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._salted)

    def add(self, plain_hashes: Iterable[bytes], block_hashes: Iterable[bytes]) -> None:
        """Add a prompt's hashes without and with its salt. A newer salt replaces an older one."""
        for plain, salted in zip(plain_hashes, block_hashes, strict=False):
            self._salted[plain] = salted
            self._salted.move_to_end(plain)
        while len(self._salted) > self._most_blocks:
            self._salted.popitem(last=False)

    def others(self, plain: bytes, own: bytes) -> tuple[bytes, ...]:
        """Return a block's hashes without a salt and under the newest known salt, except `own`."""
        salted = self._salted.get(plain)
        return tuple(name for name in (plain, salted) if name is not None and name != own)


class Held(NamedTuple):
    """A worker (host:port), and the number of a prompt's first blocks that it has."""

    worker: str
    blocks: int


NOWHERE = Held("", 0)


@dataclass(frozen=True, slots=True)
class CacheLook:
    """Snapshot of the router's view of the computing worker's cache, taken when the router placed a prompt."""

    hit_blocks: int
    follows: bool  # whether the worker's changes are applied to the router's view
    known_s: float  # seconds before the placement for which all evictions are known
    evicted: tuple[EvictedRun, ...] = ()  # evicted blocks right behind the hits


class Found(NamedTuple):
    """Numbers of a prompt's blocks that the worker had when it began to compute the prompt."""

    cached_blocks: int
    fetched_blocks: int = 0
    source: str = ""  # worker (host:port) of the fetched blocks
    loaded_blocks: int = 0  # blocks loaded from files, behind the cached and fetched ones


class Fate(StrEnum):
    """Why a block of a prompt was or was not in the computing worker's cache."""

    CACHED = auto()
    EXPECTED = auto()  # in the router's view at the placement; the prompt was not computed
    FETCHED = auto()  # fetched from another worker
    LOADED = auto()  # loaded from files
    GONE = auto()  # in the router's view at the placement, but not found by the worker
    EVICTED = auto()  # evicted before the placement
    ELSEWHERE = auto()  # cached on another worker, but not fetched from it
    OTHER_SALT = auto()  # cached under another salt, or without one
    NEVER = auto()  # never cached, as far as known
    UNKNOWN = auto()  # the worker does not report its cache
    UNUSED = auto()  # the request excludes cached blocks


@dataclass(frozen=True, slots=True)
class FateRun:
    """Adjacent blocks of a prompt with the same fate. `worker`: another worker (host:port) that has them."""

    first: int
    blocks: int
    fate: Fate
    worker: str = ""
    least_age_s: float = 0.0
    most_age_s: float = 0.0


class _Runs:
    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self.found: list[FateRun] = []
        self.end = 0

    def up_to(self, end: int, fate: Fate, worker: str = "", ages: EvictedRun | None = None) -> None:
        """Add a run of blocks from the end of the last run to `end`."""
        end = min(end, self._blocks)
        if end > self.end:
            least_s, most_s = (ages.least_age_s, ages.most_age_s) if ages is not None else (0.0, 0.0)
            self.found.append(FateRun(self.end, end - self.end, fate, worker, least_s, most_s))
            self.end = end


def autopsy(
    blocks: int, look: CacheLook | None, found: Found | None, elsewhere: Held = NOWHERE, salted: Held = NOWHERE
) -> tuple[FateRun, ...]:
    """Return the fates of the first `blocks` blocks of a prompt, in order and without gaps.

    `look` None: the request excludes cached blocks. `found` None: the prompt was not computed. `elsewhere`: longest
    prefix on another worker. `salted`: prefix that is cached under another salt or without one.
    """
    runs = _Runs(blocks)
    if look is None:
        runs.up_to(blocks, Fate.UNUSED)
        return tuple(runs.found)
    if found is None:
        runs.up_to(look.hit_blocks, Fate.EXPECTED)
    else:
        runs.up_to(found.cached_blocks, Fate.CACHED)
        brought = found.cached_blocks + found.fetched_blocks
        runs.up_to(brought, Fate.FETCHED, found.source)
        runs.up_to(brought + found.loaded_blocks, Fate.LOADED)
        runs.up_to(look.hit_blocks, Fate.GONE)
    end = look.hit_blocks
    for evicted in look.evicted:
        end += evicted.blocks
        runs.up_to(min(end, elsewhere.blocks), Fate.EVICTED, elsewhere.worker, evicted)
        runs.up_to(end, Fate.EVICTED, ages=evicted)
    runs.up_to(elsewhere.blocks, Fate.ELSEWHERE, elsewhere.worker)
    runs.up_to(salted.blocks, Fate.OTHER_SALT, salted.worker)
    runs.up_to(blocks, Fate.NEVER if look.follows else Fate.UNKNOWN)
    return tuple(runs.found)
