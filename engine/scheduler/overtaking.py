"""Which waiting prompt is admitted next, while the block that another one needs is being computed. Pure.

A prompt waits a few steps for a block that a running prompt is about to publish, rather than compute it again. Prompts
behind it are admitted meanwhile, until they have as many tokens as it has itself: from then on none goes before it. A
prompt that has no room ends the pass, so nothing overtakes it.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Protocol, TypeVar

from baton.engine.kv_cache.block_pool import BlockPool

LOOKAHEAD = 64  # prompts that may be passed over in one step: each of them is looked up in the cache


class Waiting(Protocol):
    """A prompt that waits."""

    overtaken_tokens: int
    """Of prompts that were admitted before it while it waited for a block."""

    @property
    def size_tokens(self) -> int: ...


Waiter = TypeVar("Waiter", bound=Waiting)
Admitted = TypeVar("Admitted")


def admitted(
    waiting: Iterable[Waiter], is_coming: Callable[[Waiter], bool], admit: Callable[[Waiter], Admitted | None]
) -> Iterator[Admitted]:
    """Admits from `waiting`, the oldest first, one for each that is asked for. It is iterated over again and again.

    `admit` takes a prompt out of `waiting`; None: there is no room, and nothing has changed.
    """
    passed: list[Waiter] = []
    left_tokens = math.inf  # may still go before those that were passed over
    while left_tokens > 0 and len(passed) <= LOOKAHEAD:
        each = next(islice(waiting, len(passed), None), None)
        if each is None:
            return
        if is_coming(each):
            passed.append(each)
            left_tokens = min(left_tokens, each.size_tokens - each.overtaken_tokens)
            continue
        size_tokens, made = each.size_tokens, admit(each)
        if made is None:
            return
        for other in passed:
            other.overtaken_tokens += size_tokens
        left_tokens -= size_tokens
        yield made


def is_coming(pool: BlockPool, hashes: Sequence[bytes], makes: Callable[[int, bytes], bool]) -> bool:
    """Whether the first block of `hashes` that the cache lacks is about to be published.

    `makes`, given its number and its hash, returns whether a running prompt computes it.
    """
    known = len(pool.touch(hashes))
    return known < len(hashes) and makes(known, hashes[known])
