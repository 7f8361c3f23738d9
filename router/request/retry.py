"""How a request continues when an attempt has failed: with its error, or with which tokens, when and where.

Another attempt's prompt is the prompt and the part of the answer that was given out, so that no token is sampled
twice. Each unfinished choice becomes an attempt of its own: they have different tokens by then. If no token was given
out, the attempt begins again unchanged; so does a beam search, which gives out nothing before its end.

Requests that kill the workers that compute them are found, and refused for a while (`Tries`, `Suspects`, `Quarantine`).
"""

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from baton.generation.block_hash import block_hashes
from baton.router.admission.queue import RETRY_AFTER_S
from baton.router.types.events import End, Failed, FailureReason
from baton.router.types.request import PreparedRequest, Sampling
from baton.service.errors import (
    Aborted,
    BatonError,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)

RETRYABLE = frozenset(
    {
        FailureReason.TRANSFER,
        FailureReason.CORRUPT,
        FailureReason.DRAINING,
        FailureReason.WORKER_LOST,
        FailureReason.WORKER_DIED,
        FailureReason.NO_ROOM,
        FailureReason.UNKNOWN_ATTEMPT,
    }
)
"""Another attempt, on other workers or a little later, may succeed."""
ABOUT_A_PAIR = frozenset({FailureReason.TRANSFER, FailureReason.CORRUPT})
"""Reported by a decode worker about reads from its prefill worker, whose loss it may notice first."""


PREFILL_GONE = frozenset({FailureReason.WORKER_LOST, FailureReason.WORKER_DIED, FailureReason.DRAINING})
"""Of a prefill worker: nothing is wrong with what it computed, and another prefill worker continues."""


def error_of(failed: Failed, request_id: str) -> BatonError:
    """The status that the client gets."""
    match failed.reason:
        case FailureReason.INVALID:
            return InvalidArgument("request", failed.message)
        case FailureReason.TRANSFER:
            return Unavailable(f"the KV transfer failed: {failed.message}", "TRANSFER_FAILED", RETRY_AFTER_S)
        case FailureReason.DRAINING:
            return Unavailable("the worker is draining", "DRAINING", RETRY_AFTER_S)
        case FailureReason.CORRUPT:
            return Unavailable(f"the KV failed its checksum: {failed.message}", "TRANSFER_FAILED", RETRY_AFTER_S)
        case FailureReason.WORKER_LOST | FailureReason.WORKER_DIED:
            return Unavailable(f"a worker was lost: {failed.message}", "WORKER_LOST", RETRY_AFTER_S)
        case FailureReason.ADOPTED:
            return Aborted("another stream continues this request", "SUPERSEDED")
        case FailureReason.NO_ROOM:
            return ResourceExhausted(failed.message, RETRY_AFTER_S)
        case FailureReason.DEADLINE:
            return DeadlineExceeded()
        case FailureReason.NONFINITE:
            return Internal("NONFINITE_LOGITS", request_id, "the model computed values that are not finite")
        case FailureReason.UNKNOWN | FailureReason.UNKNOWN_ATTEMPT:
            return Internal("WORKER_FAILED", request_id, failed.message)


PROGRESS_TOKENS = 2
ALL_FACTOR = 4
POISON_DEATHS = 3
SUSPECT_DEATHS = 2

_NOTICING_S = 0.2
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 2.0


@dataclass(frozen=True, slots=True)
class Tries:
    """The failed attempts at a request; at one of its choices, where that continues by itself.

    Progress is two new tokens: the first one comes with the computing of the prompt, even if its workers fail
    afterwards. An attempt that made progress resets the count of failures: a long answer may lose many workers.
    `ALL_FACTOR` bounds the cost of a request that fails again and again a little later.

    A dead process does not report the cause of its death, and many requests lose their attempt with it. So a request is
    suspected if it lost its worker twice in a row without progress in between: a request that only ran beside a deadly
    one is served by the next worker and forgiven. Two deaths can still hit the same innocents, those that wait behind
    the deadly one each time; so suspected requests run one after another (`Suspects`). A request whose worker dies a
    third time, in its turn, counts as deadly: it fails, and requests equal to it are refused (`Quarantine`).

    One case is not distinguished: an innocent in its turn whose worker is killed by something else at that moment, the
    third time in a row.
    """

    failed: int = 0
    in_a_row: int = 0  # without progress; a worker that drained did not fail
    deaths: int = 0  # of processes, in a row, without progress

    def after(self, reason: FailureReason, fresh_tokens: int, died: bool) -> "Tries":
        """One more, which made so many new tokens. `died`: the process of a worker that was at it is gone."""
        progress = fresh_tokens >= PROGRESS_TOKENS
        return Tries(
            failed=self.failed + 1,
            in_a_row=(0 if progress else self.in_a_row) + (reason is not FailureReason.DRAINING),
            deaths=(0 if progress else self.deaths) + died,
        )

    def exhausted(self, attempts: int) -> bool:
        """`attempts` may fail one after another, and `ALL_FACTOR` times as many in all."""
        return self.in_a_row >= attempts or self.failed >= ALL_FACTOR * attempts

    @property
    def poisonous(self) -> bool:
        return self.deaths >= POISON_DEATHS

    @property
    def suspect(self) -> bool:
        return self.deaths >= SUSPECT_DEATHS

    def pause_s(self, reason: FailureReason, turn: int) -> float:
        """Before the next attempt: none after a first failure, growing from there; `turn` spreads those of many.

        Where a worker's peer reported its death first, the pause is long enough that the death is noticed here.
        """
        noticing_s = _NOTICING_S if reason in ABOUT_A_PAIR else 0.0
        if self.in_a_row <= 1:
            return noticing_s
        longest_s = min(_LAST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (self.in_a_row - 2))
        return noticing_s + longest_s * (0.5 + turn % 8 / 16)


def end_of(sampling: Sampling, answered: tuple[int, ...]) -> End | None:
    """How a choice with these tokens has ended; None if it continues.

    An end comes with its token; it may be missing where the tokens come from the client or another router.
    """
    if answered and answered[-1] in sampling.stop_token_ids:
        return End.STOP
    return End.LENGTH if len(answered) >= sampling.max_tokens else None


def replays(
    whole: PreparedRequest, part: PreparedRequest, answers: Mapping[int, tuple[int, ...]]
) -> tuple[PreparedRequest, ...]:
    """The parts that are attempted instead of `part`, which failed.

    `answers` are its unfinished choices, each with its tokens that were given out; `whole` is the original request.
    """
    if whole.sampling.beams is not None or (len(answers) == len(part.choices) and not any(answers.values())):
        return (part,)
    return tuple(replay(whole, choice, answered) for choice, answered in answers.items())


def replay(whole: PreparedRequest, choice: int, answered: tuple[int, ...]) -> PreparedRequest:
    """One choice from where it is. Its hashes cover the answer too: some worker may have those blocks."""
    hashed_tokens = len(whole.block_hashes) * whole.block_tokens
    parent = whole.block_hashes[-1] if whole.block_hashes else whole.cache_root
    further = block_hashes(parent, (*whole.token_ids[hashed_tokens:], *answered), whole.block_tokens)
    return replace(
        whole,
        token_ids=(*whole.token_ids, *answered),
        block_hashes=(*whole.block_hashes, *further),
        sampling=replace(whole.sampling, n=1, prompt_logprobs=None),
        answered_tokens=len(answered),
        first_choice=choice,
    )


QUARANTINE_S = 600.0
MOST_KEPT = 1024


def request_digest(request: PreparedRequest) -> bytes:
    """Of the computation: prompt, adapter, sampling. Not of the seed, which is drawn anew where none is given."""
    adapter = "" if request.adapter is None else request.adapter.digest
    digest = hashlib.sha256(repr((adapter, replace(request.sampling, seed=0))).encode())
    digest.update(array("Q", request.token_ids).tobytes())
    return digest.digest()


class Quarantine:
    """Requests, by their digest, that are refused for a while; of more than `MOST_KEPT` the newest.

    Pure: readings of a clock. A router knows only its own requests; each of several learns by itself.
    """

    def __init__(self) -> None:
        self._until_s: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until_s)

    def add(self, found: bytes, now: float) -> None:
        self._until_s.pop(found, None)
        self._until_s[found] = now + QUARANTINE_S
        if len(self._until_s) > MOST_KEPT:
            self._until_s.popitem(last=False)

    def holds(self, request: PreparedRequest, now: float) -> bool:
        """Costs nothing while nothing is in it, as is usual."""
        while self._until_s and next(iter(self._until_s.values())) <= now:
            self._until_s.popitem(last=False)
        return bool(self._until_s) and request_digest(request) in self._until_s


class Suspects:
    """Suspected requests are attempted one at a time, in the order in which they came.

    Each is alone until it makes progress: if its worker dies then, it was this request.
    """

    def __init__(self) -> None:
        self._locks: deque[SuspectLock] = deque()  # the first one is held

    def lock(self, on_held: Callable[[], None]) -> "SuspectLock":
        """`on_held` is called once it is held, perhaps before this returns."""
        lock = SuspectLock(self._locks, on_held)
        self._locks.append(lock)
        if self._locks[0] is lock:
            on_held()
        return lock


class SuspectLock:
    """Given up exactly once, held or not: the first call releases it."""

    def __init__(self, locks: "deque[SuspectLock]", on_held: Callable[[], None]) -> None:
        self._locks = locks
        self._on_held = on_held

    def release(self) -> None:
        if self not in self._locks:
            return
        was_held = self._locks[0] is self
        self._locks.remove(self)
        if was_held and self._locks:
            self._locks[0]._on_held()


def poisonous(request_id: str) -> Internal:
    return Internal("POISON", request_id, "each worker that computed this request died; it is refused for a while")
