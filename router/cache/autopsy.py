"""Reasons why blocks of a prompt were not in the cache of the worker that computed it.

Three things say that: the newest evictions of each worker (`Evictions` in router/cache/replica.py); the blocks of other
workers, which the placement saw; and the names that blocks under a salt would have without it.

A worker's blocks are closed under parents: with a block goes everything behind it, which was used no later. What a
worker had of a prompt and evicted therefore lies right behind what it has. The first missed block shows whether there
is anything of that kind, which is one lookup for nearly all prompts.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import NamedTuple


class EvictedRun(NamedTuple):
    """Blocks side by side, and how long ago the last and the first of them were evicted."""

    blocks: int
    least_age_s: float
    most_age_s: float


SALT_BLOCKS = 128  # naming them takes 0.1 ms
MOST_SALTED_BLOCKS = 65_536  # 14 MB


class SaltedNames:
    """The names of blocks that the newest prompts with a salt had, by the names that they would have without one.

    A salt hides equal tokens from each other: only the tokens show that two prompts are equal, and those are kept
    nowhere. So when a prompt with a salt has ended, its first SALT_BLOCKS blocks are named anew without it. That is
    the name which a prompt without a salt has anyway; prompts under other salts are found through this table. Without
    salts and API keys nothing is computed or kept.
    """

    def __init__(self, most_blocks: int = MOST_SALTED_BLOCKS) -> None:
        self._most_blocks = most_blocks
        self._salted: OrderedDict[bytes, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._salted)

    def add(self, plain_hashes: Iterable[bytes], block_hashes: Iterable[bytes]) -> None:
        """A prompt under a salt; of each block the newest salt is kept."""
        for plain, salted in zip(plain_hashes, block_hashes, strict=False):
            self._salted[plain] = salted
            self._salted.move_to_end(plain)
        while len(self._salted) > self._most_blocks:
            self._salted.popitem(last=False)

    def others(self, plain: bytes, own: bytes) -> tuple[bytes, ...]:
        """Return other names of a block that is called `own`."""
        salted = self._salted.get(plain)
        return tuple(name for name in (plain, salted) if name is not None and name != own)


class Held(NamedTuple):
    """Blocks of a prompt, from its beginning, that a worker has (host:port)."""

    worker: str
    blocks: int


NOWHERE = Held("", 0)


@dataclass(frozen=True, slots=True)
class CacheLook:
    """Knowledge about the cache of the worker that computes a prompt, at the placement."""

    hit_blocks: int
    follows: bool  # the worker reports its cache
    known_s: float  # all evictions of so long before are known
    evicted: tuple[EvictedRun, ...] = ()  # right behind the hits


class Found(NamedTuple):
    """Blocks that the worker found when the prompt's turn came."""

    cached_blocks: int
    fetched_blocks: int = 0
    source: str = ""  # of the fetched ones (host:port)
    loaded_blocks: int = 0  # behind those, from files


class Fate(StrEnum):
    CACHED = auto()
    EXPECTED = auto()  # known at the placement; it did not come to computing
    FETCHED = auto()  # from another worker
    LOADED = auto()  # from files
    GONE = auto()  # known at the placement, and not found
    EVICTED = auto()  # there before, and evicted before the placement
    ELSEWHERE = auto()  # on another worker, and not fetched
    OTHER_SALT = auto()  # the same tokens are in a cache, under another salt or none
    NEVER = auto()  # as far as known
    UNKNOWN = auto()  # the worker does not report its cache
    UNUSED = auto()  # the prompt had to be computed as a whole


@dataclass(frozen=True, slots=True)
class FateRun:
    """Blocks of a prompt side by side that have one fate. `worker`: another one that has them (host:port)."""

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
        """The rest of those before number `end`."""
        end = min(end, self._blocks)
        if end > self.end:
            least_s, most_s = (ages.least_age_s, ages.most_age_s) if ages is not None else (0.0, 0.0)
            self.found.append(FateRun(self.end, end - self.end, fate, worker, least_s, most_s))
            self.end = end


def autopsy(
    blocks: int, look: CacheLook | None, found: Found | None, elsewhere: Held = NOWHERE, salted: Held = NOWHERE
) -> tuple[FateRun, ...]:
    """The fates of the first `blocks` blocks of a prompt, in order and without gaps.

    `look` None: the cache was not to be used. `found` None: it did not come to computing. `elsewhere`: the worker that
    had most of the prompt, beside the one that computes it.
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
