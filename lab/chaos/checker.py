"""Compares the stream that a client saw with an undisturbed model's answer, and how long streams stood still. Pure.

A stream that its client gave up is judged as far as it came. Where the undisturbed choice itself was close (within 1e-4
of another token), a different token is counted apart and the rest of that choice is not compared: from there on it is
another answer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, pairwise
from typing import NamedTuple

from baton.lab.chaos.faults import Fault, FaultKind
from baton.lab.chaos.history import Behaviour, StreamEnd, StreamHistory, StreamPiece

LOGPROB_TOLERANCE = 1e-4


class FindingKind(StrEnum):
    LOST = "lost"
    REPEATED = "repeated"
    REORDERED = "reordered"
    WRONG_TOKEN = "wrong token"
    WRONG_TEXT = "wrong text"
    WRONG_LOGPROB = "wrong log-probability"
    WRONG_END = "wrong end"
    TWO_ENDS = "two ends"
    NO_END = "no end"
    HANG = "hang"
    FAILED = "failed"  # the stream ended with a status that is not OK
    CLOSE = "close"  # not a fault: see above


@dataclass(frozen=True, slots=True)
class ExpectedChoice:
    token_ids: tuple[int, ...]
    text: str
    reason: str
    matched_stop: str | int | None = None
    logprobs: tuple[float, ...] = ()  # none: they are not asked for
    close: frozenset[int] = frozenset()  # offsets where another token was as good


@dataclass(frozen=True, slots=True)
class Finding:
    stream: int
    kind: FindingKind
    choice: int
    offset: int  # in the choice, where it is known; else 0
    detail: str


def check(history: StreamHistory, expected: Sequence[ExpectedChoice], bound_s: float) -> list[Finding]:
    """Return every broken promise of one stream. `bound_s`: maximum duration."""
    number, whole = history.number, history.behaviour is not Behaviour.CANCELS
    if history.closed_s is None or history.closed_s - history.began_s > bound_s:
        took = "for ever" if history.closed_s is None else f"{history.closed_s - history.began_s:.1f} s"
        return [Finding(number, FindingKind.HANG, 0, 0, f"it took {took}, {bound_s:g} s are allowed")]
    found: list[Finding] = []
    if history.failure is not None and whole:
        found.append(Finding(number, FindingKind.FAILED, 0, 0, history.failure))
    elif whole and history.starts != 1:
        found.append(Finding(number, FindingKind.WRONG_END, 0, 0, f"it was started {history.starts} times"))
    for choice, wanted in enumerate(expected):
        pieces = [piece for piece in history.pieces if piece.choice == choice]
        ends = [end for end in history.ends if end.choice == choice]
        must_end = whole and history.failure is None
        found += [
            Finding(number, kind, choice, offset, detail)
            for kind, offset, detail in _of(pieces, ends, wanted, must_end)
        ]
    unasked = {piece.choice for piece in history.pieces} - set(range(len(expected)))
    return found + [
        Finding(number, FindingKind.WRONG_TOKEN, choice, 0, "no request asked for it") for choice in sorted(unasked)
    ]


_Fault = tuple[FindingKind, int, str]


def _of(
    pieces: Sequence[StreamPiece], ends: Sequence[StreamEnd], wanted: ExpectedChoice, must_end: bool
) -> Iterator[_Fault]:
    if len(ends) > 1 or (ends and pieces and pieces[-1].at_s > ends[0].at_s):
        yield FindingKind.TWO_ENDS, 0, f"{len(ends)} ends, or tokens after one"
    unlike = _order(pieces) or _tokens(pieces, wanted)
    if unlike is not None:
        yield unlike
        return
    count, whole = sum(len(piece.token_ids) for piece in pieces), len(wanted.token_ids)
    yield from _logprob_faults(pieces, wanted, is_whole=bool(ends) and count == whole)
    if not ends:
        if must_end:
            yield FindingKind.NO_END, count, "the stream ended with OK, this choice did not end"
    elif count < whole:
        yield FindingKind.LOST, count, f"{whole - count} tokens before the end"
    elif (ends[0].reason, ends[0].matched_stop) != (wanted.reason, wanted.matched_stop):
        yield FindingKind.WRONG_END, count, f"{ends[0].reason}, {ends[0].matched_stop!r}"


def _order(pieces: Sequence[StreamPiece]) -> _Fault | None:
    """Return the fault in a choice's offsets; None if they are contiguous from 0."""
    following, seen, early = 0, set[int](), None
    for piece in pieces:
        covered = range(piece.offset, piece.offset + len(piece.token_ids))
        if not seen.isdisjoint(covered):
            return FindingKind.REPEATED, piece.offset, f"offset {piece.offset} came again, {following} was next"
        if piece.offset > following and early is None:
            early = piece.offset
        seen.update(covered)
        following = piece.offset + len(piece.token_ids)
    if early is None:
        return None
    missing = [offset for offset in range(max(seen, default=0) + 1) if offset not in seen]
    if missing:
        return FindingKind.LOST, missing[0], f"{len(missing)} tokens, from offset {missing[0]} on"
    return FindingKind.REORDERED, early, f"offset {early} came too early"


def _tokens(pieces: Sequence[StreamPiece], wanted: ExpectedChoice) -> _Fault | None:
    """The first token that is not the expected one."""
    token_ids = chain.from_iterable(piece.token_ids for piece in pieces)
    for offset, token_id in enumerate(token_ids):
        if offset >= len(wanted.token_ids):
            return FindingKind.WRONG_TOKEN, offset, "the answer should have ended"
        if token_id != wanted.token_ids[offset]:
            kind = FindingKind.CLOSE if offset in wanted.close else FindingKind.WRONG_TOKEN
            return kind, offset, f"{token_id} in place of {wanted.token_ids[offset]}"
    return None


def _logprob_faults(pieces: Sequence[StreamPiece], wanted: ExpectedChoice, is_whole: bool) -> Iterator[_Fault]:
    """Text and log-probabilities of tokens that are right. Text may lag, until the end."""
    text = "".join(piece.text for piece in pieces)
    if text != wanted.text if is_whole else not wanted.text.startswith(text):
        at = next((at for at, pair in enumerate(zip(text, wanted.text, strict=False)) if pair[0] != pair[1]), 0)
        yield FindingKind.WRONG_TEXT, 0, f"at character {at}: {text[at : at + 20]!r}"
    if not wanted.logprobs:
        return
    received = list(chain.from_iterable(piece.logprobs for piece in pieces))
    if len(received) != sum(len(piece.token_ids) for piece in pieces):
        yield FindingKind.WRONG_LOGPROB, 0, "not one for each token"
        return
    for offset, (logprob, right) in enumerate(zip(received, wanted.logprobs, strict=False)):
        if not abs(logprob - right) <= LOGPROB_TOLERANCE:
            yield FindingKind.WRONG_LOGPROB, offset, f"{logprob:.6f} in place of {right:.6f}"
            return


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
class StreamGap:
    stream: int
    fault: int  # place in the list
    seconds: float
    meanwhile: tuple[str, ...]  # the other faults that began or lasted while it stood still


class Pause(NamedTuple):
    """Pause between two tokens of a stream."""

    began_s: float
    ended_s: float

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s


def gaps_at(
    injected: Sequence[Injected], histories: Sequence[StreamHistory], kinds: frozenset[FaultKind]
) -> list[StreamGap]:
    """Return the gaps of streams that lost their decode worker to a fault of these kinds after their first token."""
    found = []
    for index, event in enumerate(injected):
        if event.fault.kind not in kinds or event.proof is None:
            continue
        hit = [name for name in event.fault.disturbs if name.startswith("decode")]
        for history in histories:
            if _was_open(history, event.at_s) and any(_lost(history, name) for name in hit):
                pause = pause_around(history.token_times, event.at_s)
                if pause is not None:
                    others = [each for each in injected if each is not event and _falls_into(each, pause)]
                    meanwhile = tuple(str(each.fault) for each in others)
                    found.append(StreamGap(history.number, index, pause.seconds, meanwhile))
    return found


def _falls_into(event: Injected, pause: Pause) -> bool:
    return event.proof is not None and event.at_s < pause.ended_s and max(event.at_s, event.healed_s) > pause.began_s


def pauses_by_kind(injected: Sequence[Injected], histories: Sequence[StreamHistory]) -> dict[FaultKind, list[float]]:
    """Return the longest pause of every stream that was open at a fault, whether or not the fault concerned it."""
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


def _was_open(history: StreamHistory, at_s: float) -> bool:
    """Return whether the stream was open and its client was reading."""
    is_over = history.closed_s is not None and history.closed_s < at_s
    return history.behaviour is Behaviour.READS and history.began_s <= at_s and not is_over


def _lost(history: StreamHistory, decode: str) -> bool:
    return any(attempt.decode == decode and attempt.failure for attempt in history.attempts)
