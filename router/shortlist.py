"""Which workers are worth a look in a large cluster, so that a decision costs little more than in a small one. Pure.

Those that have much of the prompt, and some of the others, the next ones each time: of a few dozen in turn the least
busy one is nearly the least busy of all (Mitzenmacher, The Power of Two Choices, 2001).
"""

from collections.abc import Mapping, Sequence

ALL_UP_TO = 64
HOLDERS, OTHERS = 16, 32


def shortlist(workers: Sequence[str], found: Mapping[str, int], turn: int) -> Sequence[str]:
    """All of `workers` where they are few. `found`: how many blocks of the prompt those of them have that have any."""
    if len(workers) <= ALL_UP_TO:
        return workers
    listed = _in_turn(workers, OTHERS, turn)
    if found:
        half = max(found.values()) / 2
        listed += _in_turn([worker for worker, blocks in found.items() if blocks > half], HOLDERS, turn)
    return tuple(dict.fromkeys(listed))


def _in_turn(workers: Sequence[str], count: int, turn: int) -> list[str]:
    first = turn * count % len(workers)
    return [*workers[first : first + count], *workers[: max(0, first + count - len(workers))]][: len(workers)]
