"""How long streams stood still when something happened to the worker that made them. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from chaos.faults import Fault, FaultKind
from chaos.history import Behaviour, History

SOON_S = 0.5  # a stream's last token before it stood still comes at most so long after the fault


@dataclass(frozen=True, slots=True)
class Injected:
    """A fault that was done, with the times and the proof. `proof` is None where it could not be shown."""

    fault: Fault
    at_s: float  # when its injection was over
    healed_s: float
    proof: str | None
    trouble: str = ""  # why there is no proof, or what did not recover in time


@dataclass(frozen=True, slots=True)
class Gap:
    stream: int
    fault: int  # place in the list
    seconds: float


def gaps_at(injected: Sequence[Injected], histories: Sequence[History], kinds: frozenset[FaultKind]) -> list[Gap]:
    """Of the streams that lost their decode worker to a fault of these kinds after their first token."""
    found = []
    for index, event in enumerate(injected):
        if event.fault.kind not in kinds or not event.fault.target.startswith("decode") or event.proof is None:
            continue
        for history in histories:
            if _was_open(history, event.at_s) and _lost(history, event.fault.target):
                seconds = gap_around(history.token_times, event.at_s)
                if seconds is not None:
                    found.append(Gap(history.number, index, seconds))
    return found


def pauses_by_kind(injected: Sequence[Injected], histories: Sequence[History]) -> dict[FaultKind, list[float]]:
    """Of every stream that was open at a fault, whether or not it was meant."""
    found: dict[FaultKind, list[float]] = {}
    for event in injected:
        for history in histories if event.proof is not None else ():
            seconds = gap_around(history.token_times, event.at_s) if _was_open(history, event.at_s) else None
            if seconds is not None:
                found.setdefault(event.fault.kind, []).append(seconds)
    return found


def gap_around(times: Sequence[float], at_s: float) -> float | None:
    """The longest pause that had begun by `SOON_S` after `at_s` and ended after it; None for a stream that had not
    begun by then, or was over.
    """
    pauses = [after - before for before, after in pairwise(times) if before <= at_s + SOON_S and after > at_s]
    return max(pauses, default=None) if times and times[0] <= at_s else None


def _was_open(history: History, at_s: float) -> bool:
    """And somebody was reading it."""
    is_over = history.closed_s is not None and history.closed_s < at_s
    return history.behaviour is Behaviour.READS and history.began_s <= at_s and not is_over


def _lost(history: History, decode: str) -> bool:
    return any(attempt.decode == decode and attempt.failure for attempt in history.attempts)
