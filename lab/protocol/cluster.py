"""Exploration of several requests that share workers, deaths and mishaps.

A state is a code: the spent faults, and the number of each request's state in a `RequestGraph`. Processes are
interchangeable, and so are requests and equivalent states of a request (`merged.py`): of all equivalent states of the
cluster only the one with the smallest code is expanded.

Every step increases the rank of a state, and states are expanded in the order of their ranks. So each state is expanded
once without a store of visited states, and the exploration itself shows that every run ends.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter

import numpy as np
import numpy.typing as npt

from baton.lab.protocol.explorer import RequestGraph, Spent, Violated, is_final, renamed, renamings, use_of
from baton.lab.protocol.merged import Numbers, representatives
from baton.lab.protocol.participants import MoveKind
from baton.lab.protocol.state import ClientPhase

CHUNK = 1 << 18  # states that are expanded together


@dataclass(slots=True)
class Explored:
    """Result of an exploration."""

    request_states: int = 0
    states: int = 0
    steps: int = 0
    longest_run: int = 0  # upper bound of the number of steps of a run
    most_attempts: int = 0  # largest number of attempts of one request in any run
    ends: Counter[str] = field(default_factory=Counter)  # final states by the ends of their requests


class _Edges:
    """Edges of a graph as arrays: edge `begins[n] + i` is the i-th of state n."""

    def __init__(self, after: list[list[int]]) -> None:
        counts = np.array([len(each) for each in after], dtype=np.int64)
        self.begins = np.concatenate(([0], np.cumsum(counts)))
        self.counts = counts
        self.targets = np.array([target for each in after for target in each], dtype=np.int64)

    def of(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """Return the edges of the states `numbers`: index into `numbers`, and target."""
        counts = self.counts[numbers]
        origins = np.repeat(np.arange(len(numbers)), counts)
        within = np.arange(len(origins)) - np.repeat(np.cumsum(counts) - counts, counts)
        return origins, self.targets[self.begins[numbers][origins] + within]


class ClusterStates:
    """All states of the cluster, rank by rank."""

    def __init__(self, graph: RequestGraph) -> None:
        self.graph, self.shape = graph, graph.shape
        shape, size = graph.shape, len(graph)
        faults = [Spent(d, m) for d in range(shape.deaths + 1) for m in range(shape.mishaps + 1)]
        self._merged = representatives(graph, faults)
        self._edges = {
            kind: _Edges([[after for after, its in steps if its is kind] for steps in graph.steps]) for kind in MoveKind
        }
        deaths = [each or (0,) * self._deaths for each in graph.deaths]
        self._after_death = np.array(deaths, dtype=np.int64).reshape(size, self._deaths)
        self._use = np.array([use_of(each, shape) for each in graph.states], dtype=np.int64)
        self._is_final = np.array([is_final(each) for each in graph.states])
        self._client = np.array([each.client for each in graph.states])
        self._renamed = [
            np.array([graph.find(renamed(each, *names)) for each in graph.states], dtype=np.int64)
            for names in renamings(shape)
        ]
        self._ranks, attempts = _ranks(graph, faults, self._merged)
        self.explored = Explored(request_states=size, most_attempts=attempts)

    @property
    def _deaths(self) -> int:
        shape = self.shape
        return (shape.routers + shape.prefill + shape.decode) if shape.deaths else 0

    def explore(self) -> Explored:
        """Expand all states. Raises: Violated if a run stops before its requests have ended."""
        pending: dict[int, list[Numbers]] = {}
        first = np.zeros((1, 1 + self.shape.requests), dtype=np.int64)
        self._add(pending, first)
        while pending:
            rank = min(pending)
            codes = np.unique(np.concatenate(pending.pop(rank)))
            self.explored.states += len(codes)
            self.explored.longest_run = max(self.explored.longest_run, rank)
            for begin in range(0, len(codes), CHUNK):
                for after in self._expand(self._states_of(codes[begin : begin + CHUNK])):
                    self.explored.steps += len(after)
                    self._add(pending, after)
        return self.explored

    def _expand(self, states: Numbers) -> Iterator[Numbers]:
        """Yield the states after each step from `states`: rows of spent faults and one number per request."""
        moved = np.zeros(len(states), dtype=bool)
        shape = self.shape
        for kind, column in itertools.product(MoveKind, range(1, shape.requests + 1)):
            origins, targets = self._edges[kind].of(states[:, column])
            after = states[origins]
            after[:, column] = targets
            allowed = self._fits(after)
            if kind is MoveKind.MISHAP:
                allowed &= after[:, 0] % (shape.mishaps + 1) < shape.mishaps
                after[:, 0] += 1
            if kind is MoveKind.STEP:
                moved[origins[allowed]] = True
            yield after[allowed]
        self._check_ended(states[~moved])
        alive = states[states[:, 0] // (shape.mishaps + 1) < shape.deaths]
        for process in range(self._deaths):
            after = alive.copy()
            after[:, 0] += shape.mishaps + 1
            after[:, 1:] = self._after_death[alive[:, 1:], process]
            yield after

    def _fits(self, states: Numbers) -> npt.NDArray[np.bool_]:
        used = self._use[states[:, 1]]
        for column in range(2, states.shape[1]):
            used = used + self._use[states[:, column]]
        return np.asarray((used <= self.shape.rooms).all(axis=1))

    def _check_ended(self, stopped: Numbers) -> None:
        final = self._is_final[stopped[:, 1:]].all(axis=1)
        if not final.all():
            stuck = stopped[~final][0]
            raise Violated(
                "a run stops although a request has not ended:\n"
                + "\n".join(f"{self.graph.path(number)}\n{self.graph.states[number]}" for number in stuck[1:])
            )
        for clients in self._client[stopped[:, 1:]]:
            self.explored.ends[" and ".join(sorted(ClientPhase(each).name.lower() for each in clients))] += 1

    def _add(self, pending: dict[int, list[Numbers]], states: Numbers) -> None:
        """Add states under the codes of their representatives, by rank."""
        if not len(states):
            return
        states[:, 1:] = self._merged[states[:, :1], states[:, 1:]]
        ranks = self._ranks[states[:, 1], states[:, 0]].copy()
        for column in range(2, states.shape[1]):
            ranks += self._ranks[states[:, column], states[:, 0]]
        codes = self._codes(states)
        order = np.argsort(ranks, kind="stable")
        ranks, codes = ranks[order], codes[order]
        bounds = np.flatnonzero(np.diff(ranks, prepend=-1))
        for rank, part in zip(ranks[bounds], np.split(codes, bounds[1:]), strict=True):
            pending.setdefault(int(rank), []).append(np.unique(part))

    def _codes(self, states: Numbers) -> Numbers:
        size, least = len(self.graph), None
        for names in self._renamed:
            renamed_states = names[states[:, 1:]]
            numbers = np.sort(self._merged[states[:, :1], renamed_states], axis=1)
            assert (renamed_states >= 0).all(), "an equivalent state is missing: processes are not interchangeable"
            codes = states[:, 0]
            for column in range(numbers.shape[1]):
                codes = codes * size + numbers[:, column]
            least = codes if least is None else np.minimum(least, codes)
        assert least is not None
        return least

    def _states_of(self, codes: Numbers) -> Numbers:
        columns, size = [], len(self.graph)
        for _ in range(self.shape.requests):
            columns.append(codes % size)
            codes = codes // size
        return np.stack([codes, *reversed(columns)], axis=1)


def _ranks(graph: RequestGraph, faults: Sequence[Spent], merged: Numbers) -> tuple[Numbers, int]:
    """Return the rank of each representative by spent faults, and the largest number of attempts of one request.

    The rank is the length of the longest run to the state, where a fault of another request counts as a step.
    Raises: CycleError if a run may go on for ever.
    """
    shape = graph.shape
    number: dict[tuple[int, int], int] = {fault: index for index, fault in enumerate(faults)}
    before: dict[tuple[int, int], set[tuple[int, int]]] = {}
    begins: set[tuple[int, int, int]] = set()  # edges that begin an attempt
    left = [(0, 0)]
    while left:
        node = left.pop()
        state, spent = node
        deaths, mishaps = faults[spent]
        after: list[tuple[int, int]] = []
        for target, kind in graph.steps[state]:
            if kind is not MoveKind.MISHAP:
                after.append((target, spent))
            elif mishaps < shape.mishaps:
                after.append((target, number[deaths, mishaps + 1]))
        if mishaps < shape.mishaps:
            after.append((state, number[deaths, mishaps + 1]))
        if deaths < shape.deaths:
            after += [(target, number[deaths + 1, mishaps]) for target in graph.deaths[state]]
        for target, then in after:
            each = int(merged[then, target]), then
            if each not in before:
                before[each] = set()
                left.append(each)
            before[each].add(node)
            if graph.begins_attempt(state, target):
                begins.add((state, *each))
    ranks = np.zeros((len(graph), len(faults)), dtype=np.int64)
    attempts = dict[tuple[int, int], int]()
    for node in TopologicalSorter(before).static_order():
        earlier = before.get(node, ())
        ranks[node] = max((int(ranks[each]) + 1 for each in earlier), default=0)
        attempts[node] = max((attempts[each] + ((each[0], *node) in begins) for each in earlier), default=0)
    return ranks, max(attempts.values())
