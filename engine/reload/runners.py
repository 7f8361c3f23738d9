"""Several sets of weights of one model over one KV pool. A chunk names the set that computes it by number.

Weights and adapters (engine/lora/adapters.py) are numbered together; 0 is the set that the engine was started with. No
chunk reads KV of another set, since block hashes cover the weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from baton.engine.models.batch import Model
from baton.engine.request import Chunk, ChunkResult, Plan
from baton.engine.runner.launched import NO_TOKENS, Launched
from baton.engine.runner.runner import Runner

STARTED = 0


class RunnersByWeights:
    """One runner per set of weights; implements `runner.WeightSets`. Not thread-safe."""

    def __init__(self, first: Runner) -> None:
        self._first = first  # the engine's runner: when its weights are removed, it takes those of another set
        self._runners: dict[int, Runner] = {STARTED: first}
        self._latest = STARTED
        first.weights = self

    @property
    def is_one(self) -> bool:
        return len(self._runners) == 1

    @property
    def latest(self) -> int:
        """Number of the set of weights that computed the last plan."""
        return self._latest

    def add(self, number: int, model: Model) -> None:
        """Add a set of weights. No step may be in flight."""
        self._runners[number] = self._first.beside(model)

    def remove(self, number: int) -> None:
        """Free a set of weights that no chunk uses any more. At least one set must remain."""
        gone = self._runners.pop(number)
        if gone is self._first:
            number, other = next(iter(self._runners.items()))
            self._runners[number] = self._first
            self._first.take(other.model)

    def launch(self, plan: Plan, after: Launched | None) -> Launched:
        """Launch a plan in parts, one per set of weights. `after` is allowed only if the plan uses a single set."""
        parts = self._parts(plan)
        if len(parts) == 1:
            return self._runner(parts[0]).compute(plan, after)
        launched = [self._runner(part).compute(part) for part in parts]
        return Launched(
            NO_TOKENS,
            lambda: _in_order(plan, parts, launched),
            moving_s=sum(each.moving_s for each in launched),
            masks_s=sum(each.masks_s for each in launched),
        )

    def follow(self, plan: Plan) -> None:
        """Execute a plan without sampling, on a rank that is not the leader. All chunks must use the same weights."""
        self._runner(plan).compute_kv(plan)

    def without_numbers(self, chunks: tuple[Chunk, ...]) -> tuple[Chunk, ...]:
        return tuple(each._replace(adapter=0) if each.adapter in self._runners else each for each in chunks)

    def _runner(self, plan: Plan) -> Runner:
        """Return the runner for a plan with one set of weights; the first runner if the plan has no chunks."""
        number = plan.chunks[0].adapter if plan.chunks else STARTED
        if number not in self._runners:
            return self._first
        self._latest = number
        return self._runners[number]

    def _parts(self, plan: Plan) -> list[Plan]:
        """Split a plan into one part per set of weights; the first part also moves the blocks."""
        by_number = _by_number(plan.chunks)
        if len(by_number) < 2:
            return [plan]
        first, *others = by_number.values()
        return [replace(plan, chunks=first), *map(Plan, others)]


def _by_number(chunks: tuple[Chunk, ...]) -> Mapping[int, tuple[Chunk, ...]]:
    found: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        found.setdefault(chunk.adapter, []).append(chunk)
    return {number: tuple(each) for number, each in found.items()}


def _in_order(plan: Plan, parts: Sequence[Plan], launched: Sequence[Launched]) -> tuple[ChunkResult, ...]:
    """Return the results of the parts in the order of the plan's chunks."""
    results = {part.chunks[0].adapter: iter(each.results()) for part, each in zip(parts, launched, strict=True)}
    return tuple(next(results[chunk.adapter]) for chunk in plan.chunks)
