"""How long streams stood still when something happened to the worker that made them. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

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
    meanwhile: tuple[str, ...]  # the other faults that began or lasted while it stood still


class Pause(NamedTuple):
    """Between two tokens of a stream."""

    began_s: float
    ended_s: float

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s


def gaps_at(injected: Sequence[Injected], histories: Sequence[History], kinds: frozenset[FaultKind]) -> list[Gap]:
    """Of the streams that lost their decode worker to a fault of these kinds after their first token."""
    found = []
    for index, event in enumerate(injected):
        if event.fault.kind not in kinds or not event.fault.target.startswith("decode") or event.proof is None:
            continue
        for history in histories:
            if _was_open(history, event.at_s) and _lost(history, event.fault.target):
                pause = pause_around(history.token_times, event.at_s)
                if pause is not None:
                    others = [each for each in injected if each is not event and _falls_into(each, pause)]
                    meanwhile = tuple(str(each.fault) for each in others)
                    found.append(Gap(history.number, index, pause.seconds, meanwhile))
    return found


def _falls_into(event: Injected, pause: Pause) -> bool:
    return event.proof is not None and event.at_s < pause.ended_s and max(event.at_s, event.healed_s) > pause.began_s


def pauses_by_kind(injected: Sequence[Injected], histories: Sequence[History]) -> dict[FaultKind, list[float]]:
    """Of every stream that was open at a fault, whether or not it was meant."""
    found: dict[FaultKind, list[float]] = {}
    for event in injected:
        for history in histories if event.proof is not None else ():
            pause = pause_around(history.token_times, event.at_s) if _was_open(history, event.at_s) else None
            if pause is not None:
                found.setdefault(event.fault.kind, []).append(pause.seconds)
    return found


def pause_around(times: Sequence[float], at_s: float) -> Pause | None:
    """The longest pause that had begun by `SOON_S` after `at_s` and ended after it; None for a stream that had not
    begun by then, or was over.
    """
    pauses = (Pause(before, after) for before, after in pairwise(times) if before <= at_s + SOON_S and after > at_s)
    return max(pauses, key=lambda each: each.seconds, default=None) if times and times[0] <= at_s else None


def _was_open(history: History, at_s: float) -> bool:
    """And somebody was reading it."""
    is_over = history.closed_s is not None and history.closed_s < at_s
    return history.behaviour is Behaviour.READS and history.began_s <= at_s and not is_over


def _lost(history: History, decode: str) -> bool:
    return any(attempt.decode == decode and attempt.failure for attempt in history.attempts)
