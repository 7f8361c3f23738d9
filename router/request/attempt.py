"""Attempt at a request: phases of an attempt, and counts of the failed attempts before it. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from baton.router.placement.decide import Placement
from baton.router.request.resume import AttemptLocation
from baton.router.request.retry import ABOUT_A_PAIR
from baton.router.trace.record import AttemptNote
from baton.router.types.events import Failed, FailureReason
from baton.router.types.request import PreparedRequest

PROGRESS_TOKENS = 2
ALL_FACTOR = 4
POISON_DEATHS = 3
SUSPECT_DEATHS = 2

_NOTICING_S = 0.2
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 2.0


@dataclass(frozen=True, slots=True)
class Tries:
    """Counts of failed attempts at a request, or at one of its choices if the choice is attempted separately.

    Progress means two new tokens: one is not enough, because every computed prompt yields its first token. An
    attempt that made progress resets the count of consecutive failures, because a long answer may lose many workers.
    `ALL_FACTOR` bounds the number of attempts that fail after some progress.

    A dead process does not report which request killed it, and many requests lose their attempt with it. A request is
    suspected if its worker died twice in a row without progress. A request that merely ran next to a deadly one is
    usually served by the next worker. If it ran next to the deadly one twice, it is suspected, too, so suspected
    requests run one after another (`Suspects`). If the worker dies a third time while a request runs alone, the request
    counts as deadly: it fails, and requests equal to it are rejected (`Quarantine`).

    Known limitation: a harmless request counts as deadly if something else kills its worker while it runs alone.
    """

    failed: int = 0
    in_a_row: int = 0  # consecutive failures without progress, not counting drained workers
    deaths: int = 0  # consecutive deaths of worker processes without progress

    def after(self, reason: FailureReason, fresh_tokens: int, died: bool) -> "Tries":
        """Return the counts after one more failure.

        `fresh_tokens`: number of new tokens before the failure; `died`: a worker process is gone.
        """
        progress = fresh_tokens >= PROGRESS_TOKENS
        return Tries(
            failed=self.failed + 1,
            in_a_row=(0 if progress else self.in_a_row) + (reason is not FailureReason.DRAINING),
            deaths=(0 if progress else self.deaths) + died,
        )

    def exhausted(self, attempts: int) -> bool:
        """Return whether the last `attempts` attempts failed without progress, or `ALL_FACTOR * attempts` in all."""
        return self.in_a_row >= attempts or self.failed >= ALL_FACTOR * attempts

    @property
    def poisonous(self) -> bool:
        return self.deaths >= POISON_DEATHS

    @property
    def suspect(self) -> bool:
        return self.deaths >= SUSPECT_DEATHS

    def pause_s(self, reason: FailureReason, turn: int) -> float:
        """Return the seconds before the next attempt: 0 after the first failure, then growing. `turn` spreads retries.

        After a failure between two workers, the pause also covers the time in which a worker's death is noticed.
        """
        noticing_s = _NOTICING_S if reason in ABOUT_A_PAIR else 0.0
        if self.in_a_row <= 1:
            return noticing_s
        longest_s = min(_LAST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (self.in_a_row - 2))
        return noticing_s + longest_s * (0.5 + turn % 8 / 16)


class AttemptPhase(Enum):
    TURN = 1  # suspected: waits until no other suspected request runs
    QUEUED = 2  # waits in the admission queue for capacity
    PREFILL = 3, True  # a worker computes the prompt; capacity is reserved on all workers
    TRANSFER = 4, True  # the first tokens have arrived; the prefill worker keeps the KV until decode has read it
    DECODE = 5, True  # the decode worker has the KV and alone generates the rest
    COMPLETE = 6, True  # every choice is complete; only the decode worker's report of the transfer is missing
    BACKOFF = 7  # failed, holds no resources; another attempt may follow after a pause
    ENDED = 8  # closed, holds no resources

    on_workers: bool
    """True in phases in which workers run the attempt."""

    def __init__(self, number: int, on_workers: bool = False) -> None:
        self.on_workers = on_workers


_P = AttemptPhase
NEXT: Mapping[AttemptPhase, frozenset[AttemptPhase]] = {
    _P.TURN: frozenset({_P.QUEUED, _P.ENDED}),
    _P.QUEUED: frozenset({_P.PREFILL, _P.DECODE, _P.ENDED}),
    _P.PREFILL: frozenset({_P.TRANSFER, _P.DECODE, _P.COMPLETE, _P.BACKOFF, _P.ENDED}),
    _P.TRANSFER: frozenset({_P.DECODE, _P.COMPLETE, _P.BACKOFF, _P.ENDED}),
    _P.DECODE: frozenset({_P.BACKOFF, _P.ENDED}),
    _P.COMPLETE: frozenset({_P.ENDED}),
    _P.BACKOFF: frozenset({_P.ENDED}),
    _P.ENDED: frozenset(),
}


@dataclass(eq=False, slots=True)
class Attempt:
    """Attempt at `part`: the complete request, or the rest of one choice."""

    attempt_id: int
    part: PreparedRequest
    tries: Tries  # counts of failed attempts before this one
    before: Sequence[int]  # number of released tokens of each choice when the attempt began
    unscored: int  # number of prompt tokens whose log-probabilities have not arrived
    unreported: set[int]  # choices without any output yet
    unfinished: set[int]  # choices that may still run on the decode worker
    phase: AttemptPhase
    adopts: AttemptLocation | None = None  # another router's attempt that this one continues
    note: AttemptNote | None = None  # description for `baton why`; None: not placed
    busy: set[str] = field(default_factory=set)  # endpoints of workers that may still hold resources of the attempt
    failed: Failed | None = None
    fresh_tokens: int = 0  # number of new tokens generated before the failure

    @property
    def placement(self) -> Placement:
        """Placement of the attempt on workers. Raises: RuntimeError if the attempt is not placed yet."""
        if self.note is None:
            raise RuntimeError(f"attempt {self.attempt_id} is not placed yet")
        return self.note.placement

    def enter(self, phase: AttemptPhase) -> None:
        """Change the phase. Raises: RuntimeError if `phase` cannot follow the present phase."""
        if phase not in NEXT[self.phase]:
            raise RuntimeError(f"attempt {self.attempt_id}: {phase.name} cannot follow {self.phase.name}")
        self.phase = phase
