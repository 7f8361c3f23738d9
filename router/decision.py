"""The costs by which a request was placed, as they were then: an explanation shows them and computes none again."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import StrEnum, auto

from router.candidates import WorkerView
from router.policies.policy import Costs


class LocalPrefill(StrEnum):
    """Why a decode worker computes the prompt itself."""

    NO_PREFILL_WORKER = auto()
    PREFILL_WORKERS_FAILED = auto()  # each of them failed this request before
    SHORT_SUFFIX = auto()  # next to nothing of the prompt is not cached there
    PREFILL_WORKERS_BUSY = auto()  # the way over them would take much longer


@dataclass(slots=True)  # not frozen: made for every request, as the views are
class Weighed:
    """The candidates for one part of the work, the cost of each, and the one that was taken: the cheapest."""

    workers: Sequence[WorkerView]
    costs: Costs
    worker: WorkerView

    def terms(self) -> Mapping[str, Mapping[str, float]]:
        """By endpoint: the terms of its cost, by name."""
        columns = self.costs.terms.items()
        return {
            worker.endpoint: {name: column[place] for name, column in columns}
            for place, worker in enumerate(self.workers)
        }

    def totals(self) -> Mapping[str, float]:
        """By endpoint."""
        return {worker.endpoint: total for worker, total in zip(self.workers, self.costs.totals, strict=True)}

    def only(self, endpoints: Set[str]) -> "Weighed":
        places = [place for place, worker in enumerate(self.workers) if worker.endpoint in endpoints]

        def at(column: Sequence[float]) -> Sequence[float]:
            return [column[place] for place in places]

        costs = Costs(at(self.costs.totals), {name: at(column) for name, column in self.costs.terms.items()})
        return Weighed([self.workers[place] for place in places], costs, self.worker)


@dataclass(slots=True)
class Decision:
    """Which workers were taken. `prefill` is weighed also where `local` then says that it is not used: but where the
    prefill workers were too busy, `decode` was weighed with one of them to compute the prompt.
    """

    workers: Sequence[WorkerView]  # all that were looked at
    suited: Sequence[WorkerView]  # those of them that have the model
    prefill: Weighed | None
    decode: Weighed
    local: LocalPrefill | None
    soonest_prefill_ms: float = 0.0  # to the first token over a prefill worker, where `local` depended on that

    def kept(self, most: int) -> "Decision":
        """With at most so many workers: those that were taken and the first of the others."""
        if len(self.workers) <= most:
            return self
        taken = [each.worker for each in (self.prefill, self.decode) if each is not None]
        workers = [*taken, *(worker for worker in self.workers if worker not in taken)][:most]
        endpoints = {worker.endpoint for worker in workers}
        prefill = self.prefill.only(endpoints) if self.prefill is not None else None
        return replace(self, workers=workers, suited=(), prefill=prefill, decode=self.decode.only(endpoints))
