"""Compare a client's stream with the undisturbed answer, and measure gaps between its tokens. Pure.

A cancelled stream is judged up to its last token. Where the undisturbed answer had a second token within 1e-4 of the
chosen one, a different token is reported as CLOSE, which is no fault. The rest of that choice is not compared, since
all later tokens depend on the different token.
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
    FAILED = "failed"  # the stream ended with a status other than OK
    CLOSE = "close"  # no fault: a different token at an offset where two tokens were within 1e-4


@dataclass(frozen=True, slots=True)
class ExpectedChoice:
    token_ids: tuple[int, ...]
    text: str
    reason: str
    matched_stop: str | int | None = None
    logprobs: tuple[float, ...] = ()  # one per token; empty if not requested
    close: frozenset[int] = frozenset()  # token offsets at which a second token was within 1e-4 of the chosen token


@dataclass(frozen=True, slots=True)
class Finding:
    stream: int
    kind: FindingKind
    choice: int
    offset: int  # token offset in the choice; 0 if unknown
    detail: str


def check(history: StreamHistory, expected: Sequence[ExpectedChoice], bound_s: float) -> list[Finding]:
    """Return all findings of one stream. `bound_s`: longest allowed duration."""
    number, whole = history.number, history.behaviour is not Behaviour.CANCELS
    if history.closed_s is None or history.closed_s - history.began_s > bound_s:
        took = "is still open" if history.closed_s is None else f"took {history.closed_s - history.began_s:.1f} s"
        return [Finding(number, FindingKind.HANG, 0, 0, f"stream {took}; at most {bound_s:g} s are allowed")]
    found: list[Finding] = []
    if history.failure is not None and whole:
        found.append(Finding(number, FindingKind.FAILED, 0, 0, history.failure))
    elif whole and history.starts != 1:
        found.append(Finding(number, FindingKind.WRONG_END, 0, 0, f"stream has {history.starts} start events, not 1"))
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
        Finding(number, FindingKind.WRONG_TOKEN, choice, 0, "choice was not requested") for choice in sorted(unasked)
    ]


_Fault = tuple[FindingKind, int, str]


def _of(
    pieces: Sequence[StreamPiece], ends: Sequence[StreamEnd], wanted: ExpectedChoice, must_end: bool
) -> Iterator[_Fault]:
    if len(ends) > 1 or (ends and pieces and pieces[-1].at_s > ends[0].at_s):
        yield FindingKind.TWO_ENDS, 0, f"{len(ends)} end events, or tokens after one"
    unlike = _order(pieces) or _tokens(pieces, wanted)
    if unlike is not None:
        yield unlike
        return
    count, whole = sum(len(piece.token_ids) for piece in pieces), len(wanted.token_ids)
    yield from _logprob_faults(pieces, wanted, is_whole=bool(ends) and count == whole)
    if not ends:
        if must_end:
            yield FindingKind.NO_END, count, "stream closed with OK, but this choice has no end event"
    elif count < whole:
        yield FindingKind.LOST, count, f"{whole - count} tokens missing before the end"
    elif (ends[0].reason, ends[0].matched_stop) != (wanted.reason, wanted.matched_stop):
        yield FindingKind.WRONG_END, count, f"{ends[0].reason}, {ends[0].matched_stop!r}"


def _order(pieces: Sequence[StreamPiece]) -> _Fault | None:
    """Return the fault in the token offsets of one choice; None if they are contiguous from 0."""
    following, seen, early = 0, set[int](), None
    for piece in pieces:
        covered = range(piece.offset, piece.offset + len(piece.token_ids))
        if not seen.isdisjoint(covered):
            return FindingKind.REPEATED, piece.offset, f"offset {piece.offset} repeated, expected {following}"
        if piece.offset > following and early is None:
            early = piece.offset
        seen.update(covered)
        following = piece.offset + len(piece.token_ids)
    if early is None:
        return None
    missing = [offset for offset in range(max(seen, default=0) + 1) if offset not in seen]
    if missing:
        return FindingKind.LOST, missing[0], f"{len(missing)} tokens missing from offset {missing[0]}"
    return FindingKind.REORDERED, early, f"offset {early} arrived too early"


def _tokens(pieces: Sequence[StreamPiece], wanted: ExpectedChoice) -> _Fault | None:
    """Return the fault of the first token that differs from the expected one; None if none differs."""
    token_ids = chain.from_iterable(piece.token_ids for piece in pieces)
    for offset, token_id in enumerate(token_ids):
        if offset >= len(wanted.token_ids):
            return FindingKind.WRONG_TOKEN, offset, "token after the expected end"
        if token_id != wanted.token_ids[offset]:
            kind = FindingKind.CLOSE if offset in wanted.close else FindingKind.WRONG_TOKEN
            return kind, offset, f"token {token_id} instead of {wanted.token_ids[offset]}"
    return None


def _logprob_faults(pieces: Sequence[StreamPiece], wanted: ExpectedChoice, is_whole: bool) -> Iterator[_Fault]:
    """Yield faults in text and log-probabilities of a choice with the right tokens.

    The text of an incomplete choice may lag behind its tokens.
    """
    text = "".join(piece.text for piece in pieces)
    if text != wanted.text if is_whole else not wanted.text.startswith(text):
        at = next((at for at, pair in enumerate(zip(text, wanted.text, strict=False)) if pair[0] != pair[1]), 0)
        yield FindingKind.WRONG_TEXT, 0, f"at character {at}: {text[at : at + 20]!r}"
    if not wanted.logprobs:
        return
    received = list(chain.from_iterable(piece.logprobs for piece in pieces))
    if len(received) != sum(len(piece.token_ids) for piece in pieces):
        yield FindingKind.WRONG_LOGPROB, 0, f"{len(received)} log-probabilities, not one per token"
        return
    for offset, (logprob, right) in enumerate(zip(received, wanted.logprobs, strict=False)):
        if not abs(logprob - right) <= LOGPROB_TOLERANCE:
            yield FindingKind.WRONG_LOGPROB, offset, f"log-probability {logprob:.6f} instead of {right:.6f}"
            return


SOON_S = 0.5  # longest time from a fault to the gap that it causes: some tokens still arrive


@dataclass(frozen=True, slots=True)
class Injected:
    """Injected fault with its evidence. `proof`: None if there is no evidence. Times are monotonic."""

    fault: Fault
    at_s: float  # time at which the injection had finished
    healed_s: float
    proof: str | None
    trouble: str = ""  # why the proof is missing, or which processes did not recover in time


@dataclass(frozen=True, slots=True)
class StreamGap:
    stream: int
    fault: int  # index in the list of injected faults
    seconds: float
    meanwhile: tuple[str, ...]  # names of other faults during the gap


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
    """Return the gap of each stream that lost its decode worker to a fault of these kinds after its first token."""
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
    """Return, by kind of fault, the longest pause of each open stream around each fault of that kind.

    Streams that the fault did not affect are included.
    """
    found: dict[FaultKind, list[float]] = {}
    for event in injected:
        for history in histories if event.proof is not None else ():
            pause = pause_around(history.token_times, event.at_s) if _was_open(history, event.at_s) else None
            if pause is not None:
                found.setdefault(event.fault.kind, []).append(pause.seconds)
    return found


def pause_around(times: Sequence[float], at_s: float) -> Pause | None:
    """Return the longest pause that began by `at_s` + SOON_S and ended after `at_s`.

    None if the stream had no token before `at_s`, or none after it.
    """
    pauses = (Pause(before, after) for before, after in pairwise(times) if before <= at_s + SOON_S and after > at_s)
    return max(pauses, key=lambda each: each.seconds, default=None) if times and times[0] <= at_s else None


def _was_open(history: StreamHistory, at_s: float) -> bool:
    """Return whether the stream was open at that time and its client reads without pauses or cancels."""
    is_over = history.closed_s is not None and history.closed_s < at_s
    return history.behaviour is Behaviour.READS and history.began_s <= at_s and not is_over


def _lost(history: StreamHistory, decode: str) -> bool:
    return any(attempt.decode == decode and attempt.failure for attempt in history.attempts)
