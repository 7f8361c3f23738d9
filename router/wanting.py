"""What a router asks a decode worker to lend it: for the first request of its queue, where that takes more than the
router may have there at all. One worker at a time. Does no I/O.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from router.candidates import PlacementRequest, WorkerView
from router.worker import WorkerRole


class Unmet(NamedTuple):
    """A request that there is no room for, and the workers as they were when that was decided."""

    request: PlacementRequest
    workers: Sequence[WorkerView]


class Want(NamedTuple):
    """The request's needs, beside this router's present charges on the worker."""

    endpoint: str
    blocks: int
    slots: int


class Wanting:
    def __init__(self) -> None:
        self.on_want: Callable[[Want], None] = _tell_nobody
        """Called with what is wanted; with 0 blocks and 0 slots when nothing more is wanted from a worker."""
        self._wanted: Want | None = None

    def follow(self, unmet: Unmet | None) -> None:
        """The first request that has no room now; None: all have been placed."""
        wanted = None if unmet is None else want(unmet, None if self._wanted is None else self._wanted.endpoint)
        if wanted == self._wanted:
            return
        before, self._wanted = self._wanted, wanted
        if before is not None and (wanted is None or wanted.endpoint != before.endpoint):
            self.on_want(Want(before.endpoint, 0, 0))
        if wanted is not None:
            self.on_want(wanted)


def want(unmet: Unmet, asked: str | None) -> Want | None:
    """From which worker; None where the request only waits for others of this router. `asked`: the last one asked."""
    request = unmet.request
    workers = [worker for worker in unmet.workers if worker.role is WorkerRole.DECODE and _could_hold(worker, request)]
    if not workers or any(_lacking(worker, request) <= 0 for worker in workers):
        return None
    before = [worker for worker in workers if worker.endpoint == asked]
    chosen = min(before or workers, key=lambda worker: _lacking(worker, request))
    return Want(chosen.endpoint, request.charged_on(chosen), request.choices)


def _could_hold(worker: WorkerView, request: PlacementRequest) -> bool:
    fits = request.longest_blocks <= worker.total_blocks and request.choices <= worker.total_slots
    return fits and request.suits(worker)


def _lacking(worker: WorkerView, request: PlacementRequest) -> float:
    """Its need beyond all that this router may have there, as a share of the worker."""
    blocks = (request.charged_on(worker) - worker.limit_blocks) / worker.total_blocks
    return max(blocks, (request.choices - worker.limit_slots) / worker.total_slots)


def _tell_nobody(wanted: Want) -> None:
    """Limits of workers then stay unchanged."""
