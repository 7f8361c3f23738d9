"""Counts of the events in a world: seeds in which nothing happens prove nothing."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from decode_worker.adoption import Adoptions
from engine.mixed_batch import MixedBatch
from kvtransfer.source import SourceTable
from prefill_worker.fetch import PrefixFetcher
from service.session_hub import SessionHub

if TYPE_CHECKING:
    from simulation.processes import Machine
    from simulation.world import World

_CALLS: tuple[tuple[type, str, str], ...] = (
    (Adoptions, "tell_again", "answers taken over by another router"),
    (MixedBatch, "preempt", "sequences preempted"),
    (PrefixFetcher, "fetch", "prefixes looked for at another worker"),
    (SessionHub, "end", "sessions ended by a worker"),
    (SourceTable, "confirm", "transfers confirmed"),
    (SourceTable, "drop", "transfers dropped by their source"),
)


@contextmanager
def counting(counts: Counter[str]) -> Iterator[None]:
    """Within, calls of some functions are counted."""
    with ExitStack() as undo:
        for owner, name, what in _CALLS:
            undo.enter_context(patch.object(owner, name, _counted(getattr(owner, name), counts, what)))
        yield


def _counted(real: Callable[..., Any], counts: Counter[str], what: str) -> Callable[..., Any]:
    def counted(*arguments: Any, **more: Any) -> Any:
        counts[what] += 1
        return real(*arguments, **more)

    return counted


def has_work(machine: "Machine") -> bool:
    """Whether a fault that befalls it now meets anything."""
    life = machine.life
    if life is None:
        return False
    if life.router is not None:
        return life.router.dispatcher.active > 0
    return life.worker is not None and life.worker.service.busy


def count_at_end(world: "World", counts: Counter[str]) -> None:
    """Adds the counts that the parts of a world keep themselves."""
    counts["messages held back by a cut"] += world.network.cuts_felt
    counts["attempts that failed and were followed by another"] += len(world.trace.retried)
    for machine in world.workers:
        for life in machine.lives:
            if life.host is not None:
                counts["computations made not finite"] += life.host.runner.poison.done
            if life.pulls is not None:
                counts["bits flipped"] += life.pulls.flipped
            reader: Any = getattr(life.worker, "_reader", None) or getattr(life.worker, "_fetcher", None)
            if reader is not None:
                counts["blocks compared with their source"] += reader.integrity.checked_blocks
                counts["checksums that differed"] += reader.integrity.checksum_mismatches
