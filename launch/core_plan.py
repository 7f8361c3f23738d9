"""Which CPU cores each process of one machine gets. Pure: cores in, plan out.

Workers come first, on disjoint cores while there are enough: a decode step must not wait for any prompt. Router, Redis
and the copying of KV take a core of their own if one is left, else that of the last prefill worker, never decode's.
With more workers than cores they share, round robin.

Without prefill workers no step is to be kept from another's: decode workers divide all cores, and the router and the
rest run wherever they find one free.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CorePlan:
    router: tuple[int, ...]
    # Threads that copy KV, in any worker.
    transfer: tuple[int, ...]
    # One entry per worker.
    decode: tuple[tuple[int, ...], ...]
    prefill: tuple[tuple[int, ...], ...]


def plan_cores(available: Sequence[int], prefill: int, decode: int) -> CorePlan:
    """Splits `available` among `decode` workers, at least one, and `prefill` workers."""
    cores, workers = list(available), prefill + decode
    if not prefill:
        groups = _deal(cores, decode) if len(cores) >= decode else _in_turn(cores, decode)
        return CorePlan(router=tuple(cores), transfer=tuple(cores), decode=tuple(groups), prefill=())
    if len(cores) > workers:
        *cores, last = cores
        groups = _deal(cores, workers)
        router: tuple[int, ...] = (last,)
    else:
        groups = _in_turn(cores, workers)
        router = groups[-1]
    return CorePlan(router=router, transfer=router, decode=tuple(groups[:decode]), prefill=tuple(groups[decode:]))


def _in_turn(cores: Sequence[int], workers: int) -> list[tuple[int, ...]]:
    return [(cores[worker % len(cores)],) for worker in range(workers)]


def _deal(cores: Sequence[int], workers: int) -> list[tuple[int, ...]]:
    """Consecutive runs of nearly equal length; the last groups, which are prefill's, take the remainder."""
    each, extra = divmod(len(cores), workers)
    groups, start = [], 0
    for worker in range(workers):
        end = start + each + (worker >= workers - extra)
        groups.append(tuple(cores[start:end]))
        start = end
    return groups


def write_cores(cores: Sequence[int]) -> str:
    """(0, 1) -> `0,1`, as the `--cores` flag of every process reads it."""
    return ",".join(map(str, cores))
