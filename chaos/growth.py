"""Whether memory, descriptors and threads of processes stay as they are while they live. Pure.

What counts is private memory: pages of KV pools, a process's own and those that it maps to read, become resident when
they are first touched, are shared, and have a size that is known. A life begins with a warm-up in which caches fill,
connections are made and the allocator gets its arenas. After it a process may grow by `BOUND_BYTES` in all, however
long it lives: that is what its bounded records hold (answers and explanations that are kept for a while, of up to 4 096
requests), and what the allocator may lay out differently. A leak of one object per token or request passes any bound
that does not grow with time; the longest lives find it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from chaos.watch import HARNESS, Look

WARM_UP_S = 30.0
LEAST_S = 60.0  # of a life after that: a shorter one tells nothing
ENDS = 6  # of so many parts of a life the first and the last are compared, by their medians
BOUND_BYTES = 12 << 20
BOUND_DESCRIPTORS = 32  # connections of others come and go
BOUND_HARNESS_DESCRIPTORS = 128  # three for each connection of a client: its own, and both sides of the proxy's
BOUND_THREADS = 8


@dataclass(frozen=True, slots=True)
class Growth:
    """How one life of a process changed after its warm-up."""

    name: str
    pid: int
    seconds: float
    rss_bytes: int  # at its end
    private_bytes: tuple[int, int]  # at first and at last, as are the following
    descriptors: tuple[int, int]
    threads: tuple[int, int]

    @property
    def grown_bytes(self) -> int:
        return self.private_bytes[1] - self.private_bytes[0]

    @property
    def per_minute(self) -> float:
        """Bytes."""
        return 60 * self.grown_bytes / (self.seconds * (1 - 1 / ENDS))

    @property
    def is_flat(self) -> bool:
        descriptors = BOUND_HARNESS_DESCRIPTORS if self.name == HARNESS else BOUND_DESCRIPTORS
        return (
            self.grown_bytes <= BOUND_BYTES
            and self.descriptors[1] - self.descriptors[0] <= descriptors
            and self.threads[1] - self.threads[0] <= BOUND_THREADS
        )


def growth(looks: Sequence[Look], warm_up_s: float = WARM_UP_S, least_s: float = LEAST_S) -> list[Growth]:
    """Of every life that lasted `least_s` after it had warmed up."""
    lives: dict[tuple[str, int], list[Look]] = {}
    for look in looks:
        lives.setdefault((look.name, look.pid), []).append(look)
    found = []
    for (name, pid), life in sorted(lives.items()):
        settled = [look for look in life if look.at_s >= life[0].at_s + warm_up_s]
        if len(settled) < ENDS or settled[-1].at_s - settled[0].at_s < least_s:
            continue
        part = len(settled) // ENDS
        first, last = settled[:part], settled[-part:]

        def ends(of: str, first: Sequence[Look] = first, last: Sequence[Look] = last) -> tuple[int, int]:
            before, after = (round(median(getattr(look, of) for look in looks)) for looks in (first, last))
            return before, after

        seconds, rss_bytes = settled[-1].at_s - settled[0].at_s, settled[-1].rss_bytes
        found.append(Growth(name, pid, seconds, rss_bytes, ends("private_bytes"), ends("descriptors"), ends("threads")))
    return found
