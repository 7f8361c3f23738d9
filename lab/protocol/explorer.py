"""All states of one request that the faults of a shape allow, as numbers. Pure."""

import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from baton.lab.protocol import specification as spec
from baton.lab.protocol.participants import BEYOND_PREFILL, CHOICE, ClusterSize, MoveKind, forsaken, moves
from baton.lab.protocol.specification import ProcessKind
from baton.lab.protocol.state import (
    GONE,
    NOBODY,
    OVER,
    PINNED,
    WITH_BLOCKS,
    AnswerPhase,
    ClientPhase,
    ReaderPhase,
    SourcePhase,
    SpecAttempt,
    SpecRequest,
)


class Violated(Exception):
    """Error: a participant makes a step that the specification does not enable, or a request never ends."""


class Spent(NamedTuple):
    """Faults that have happened."""

    deaths: int = 0
    mishaps: int = 0


def first_state(shape: ClusterSize) -> SpecRequest:
    return SpecRequest(ClientPhase.WAITING, (0,), kept=(0,) * shape.decode)


def normal(request: SpecRequest) -> SpecRequest:
    """Return the state without what no later step depends on."""
    if request.reads != NOBODY and request.streams[request.reads].router == NOBODY:
        # The client notices; what it receives before could have arrived before the router's death, too.
        request = request._replace(client=ClientPhase.WAITING, reads=NOBODY)
    request, over = forsaken(request), request.client in OVER
    attempts = [_normal(each, _released(request, each)) for each in request.attempts]
    asked = {each.adopts for each in attempts if each.answer is AnswerPhase.ASKED}
    left = [index for index, each in enumerate(attempts) if index in asked or each.followed or each.answer not in GONE]
    streams = [index for index, each in enumerate(request.streams) if each.router != NOBODY]
    # The stream that the client reads is the last one: older ones only wait to be closed.
    place = {old: new for new, old in enumerate(streams)} | {NOBODY: NOBODY}
    moved = {old: new for new, old in enumerate(left)}
    kept = tuple(
        attempts[index]._replace(stream=place[attempts[index].stream], adopts=moved.get(attempts[index].adopts, NOBODY))
        for index in left
    )
    kept_blocks = (0,) * len(request.kept)
    return request._replace(
        got=(0,) if over else request.got,
        reads=place[request.reads],
        streams=tuple(request.streams[index] for index in streams),
        attempts=kept,
        kept=kept_blocks if over else request.kept,
    )


_NOT_THERE = frozenset({SourcePhase.NONE, SourcePhase.ENDED, SourcePhase.DEAD})


def _released(request: SpecRequest, attempt: SpecAttempt) -> int:
    return 0 if attempt.stream == NOBODY else request.streams[attempt.stream].released[CHOICE]


def _normal(attempt: SpecAttempt, released: int) -> SpecAttempt:
    if attempt.answer in BEYOND_PREFILL and released > attempt.based and attempt.source in _NOT_THERE:
        attempt = attempt._replace(prefill=NOBODY, source=SourcePhase.ENDED)
    if attempt.answer is not AnswerPhase.ASKED:
        attempt = attempt._replace(adopts=NOBODY)
    if attempt.source in _NOT_THERE and attempt.answer is not AnswerPhase.RESERVED:
        attempt = attempt._replace(reader=ReaderPhase.NEVER, offered=0, landed=0, sound=0, confirmed=0)
    if not attempt.followed:  # it only waits for its copy to finish
        attempt = attempt._replace(stream=NOBODY, prefill=NOBODY, source=SourcePhase.ENDED, based=0, made=(0,))
        attempt = attempt._replace(first=False, estranged=False, closing=False)
    return attempt


def is_final(request: SpecRequest) -> bool:
    """Return whether the request has ended and nothing of it is left anywhere."""
    return request.client in OVER and not request.attempts and not request.streams


def use_of(request: SpecRequest, shape: ClusterSize) -> list[int]:
    """Return the prompts that hold blocks by prefill worker, and by decode worker the answers with blocks and the
    attempts that routers charge.
    """
    prompts, answers, charges = [0] * shape.prefill, [0] * shape.decode, [0] * shape.decode
    for each in request.attempts:
        prompts[each.prefill] += each.source in PINNED and each.offered > 0
        answers[each.decode] += each.answer in WITH_BLOCKS
        charges[each.decode] += _is_charged(each)
    return [*prompts, *answers, *charges]


def _is_charged(attempt: SpecAttempt) -> bool:
    """Return whether a router needs a decode worker's credit for the attempt. An adoption needs none."""
    is_adoption = attempt.estranged or attempt.answer is AnswerPhase.ASKED
    return attempt.followed and attempt.stream != NOBODY and not is_adoption


def processes(shape: ClusterSize) -> list[tuple[ProcessKind, int]]:
    counts = (
        (ProcessKind.ROUTER, shape.routers),
        (ProcessKind.PREFILL, shape.prefill),
        (ProcessKind.DECODE, shape.decode),
    )
    return [(kind, number) for kind, count in counts for number in range(count)]


class RequestGraph:
    """Graph of one request: its states by number, and the numbers of the states after each step."""

    def __init__(self, shape: ClusterSize) -> None:
        """Explore every state that the shape's faults allow. Raises: Violated."""
        self.shape = shape
        self.states: list[SpecRequest] = []
        self.steps: list[tuple[tuple[int, MoveKind], ...]] = []
        self.deaths: list[tuple[int, ...]] = []  # state after the death of each process
        self._numbers: dict[SpecRequest, int] = {}
        self._came_from: list[tuple[int, str]] = []
        self._attempts: set[tuple[int, int]] = set()
        self._explore()

    def __len__(self) -> int:
        return len(self.states)

    def path(self, number: int) -> list[str]:
        """Return the steps that lead to a state."""
        names: list[str] = []
        while number:
            number, name = self._came_from[number]
            names.append(name)
        return names[::-1]

    def find(self, request: SpecRequest) -> int:
        """Return the number of a state; -1 if it needs more faults than the shape allows."""
        return self._numbers.get(request, -1)

    def begins_attempt(self, number: int, after: int) -> bool:
        """Return whether a router begins an attempt in the step between two states."""
        return (number, after) in self._attempts

    def _explore(self) -> None:
        self._add(normal(first_state(self.shape)), 0, "")
        best: dict[int, set[Spent]] = {}
        level = [(0, Spent())]
        while level:
            following: list[tuple[int, Spent]] = []
            for number, spent in level:
                others = best.setdefault(number, set())
                if any(each.deaths <= spent.deaths and each.mishaps <= spent.mishaps for each in others):
                    continue
                others.add(spent)
                following += self._after(number, spent)
            level = following

    def _after(self, number: int, spent: Spent) -> Iterator[tuple[int, Spent]]:
        self._expand(number)
        for after, kind in self.steps[number]:
            costs = kind is MoveKind.MISHAP
            if spent.mishaps + costs <= self.shape.mishaps:
                yield after, spent._replace(mishaps=spent.mishaps + costs)
        if spent.deaths < self.shape.deaths:
            for after in self.deaths[number]:
                yield after, spent._replace(deaths=spent.deaths + 1)

    def _expand(self, number: int) -> None:
        if self.steps[number] or self.deaths[number]:
            return
        request, after = self.states[number], dict[int, MoveKind]()
        for move in moves(request, self.shape):
            if move.kind is MoveKind.MISHAP and not self.shape.mishaps:
                continue
            if move.after is None:
                path = "\n".join((*self.path(number), move.name))
                raise Violated(f"{move.refusal}:\n{path}\n{request}")
            at = self._add(normal(move.after), number, move.name)
            after[at] = min(move.kind, after.get(at, move.kind))
            if move.name.startswith(("router dispatches", "router asks")):
                self._attempts.add((number, at))
        self.steps[number] = tuple(after.items())
        if self.shape.deaths:
            self.deaths[number] = tuple(
                self._add(normal(spec.die(request, kind, process)), number, f"{kind.name.lower()} {process} dies")
                for kind, process in processes(self.shape)
            )

    def _add(self, request: SpecRequest, came_from: int, name: str) -> int:
        number = self._numbers.setdefault(request, len(self.states))
        if number == len(self.states):
            self.states.append(request)
            self.steps.append(())
            self.deaths.append(())
            self._came_from.append((came_from, name))
        return number


def renamed(
    request: SpecRequest, routers: Mapping[int, int], prefill: Mapping[int, int], decode: Mapping[int, int]
) -> SpecRequest:
    """Return the state with other numbers of processes."""
    kept = list(request.kept)
    for old, new in decode.items():
        kept[new] = request.kept[old]
    return request._replace(
        kept=tuple(kept),
        streams=tuple(each._replace(router=routers[each.router]) for each in request.streams),
        attempts=tuple(
            each._replace(prefill=prefill.get(each.prefill, NOBODY), decode=decode.get(each.decode, NOBODY))
            for each in request.attempts
        ),
    )


def renamings(shape: ClusterSize) -> list[tuple[dict[int, int], dict[int, int], dict[int, int]]]:
    orders = (itertools.permutations(range(count)) for count in (shape.routers, shape.prefill, shape.decode))
    return [(dict(enumerate(a)), dict(enumerate(b)), dict(enumerate(c))) for a, b, c in itertools.product(*orders)]
