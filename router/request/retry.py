"""How a request continues when an attempt has failed: with its error, or with which tokens, when and where.

Another attempt's prompt is the prompt and the part of the answer that was given out, so that no token is sampled
twice. Each unfinished choice becomes an attempt of its own: they have different tokens by then. If no token was given
out, the attempt begins again unchanged; so does a beam search, which gives out nothing before its end.

Progress is two new tokens. The first one comes with the computing of the prompt, even if its workers fail afterwards.
An attempt that made progress resets the count of failures: a long answer may lose many workers. `ALL_FACTOR`
bounds the cost of a request that fails again and again a little later.

A dead process does not report the cause of its death, and many requests lose their attempt with it. So a request is
suspected if it lost its worker twice in a row without progress in between: a request that only
ran beside a deadly one is served by the next worker and forgiven. Two deaths can still hit the same innocents, those
that wait behind the deadly one each time. Therefore suspected requests run one after another, each alone until it
makes progress (`Suspects`). One whose worker dies a third time, in its turn, counts as deadly: it fails, and
requests equal to it are refused for `QUARANTINE_S` (`Quarantine`).

One case is not distinguished: an innocent in its turn whose worker is killed by something else at that moment, the
third time in a row. A router knows only its own requests; each of several learns by itself.
"""

import asyncio
import hashlib
import logging
import time
from array import array
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

from baton.generation.block_hash import block_hashes
from baton.router.admission.queue import RETRY_AFTER_S, AdmissionQueue
from baton.router.fleet.fleet import Fleet
from baton.router.placement.cluster import Cluster
from baton.router.trace.decision_record import AttemptNote
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


class AttemptFailed(Exception):
    """One attempt at a request ended without an answer."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(f"{failed.reason.name} at {failed.endpoint}: {failed.message}")
        self.failed = failed


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
    """The failed attempts at a request; at one of its choices, where that continues by itself."""

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


def fingerprint(request: PreparedRequest) -> bytes:
    """Of the computation: prompt, adapter, sampling. Not of the seed, which is drawn anew where none is given."""
    adapter = "" if request.adapter is None else request.adapter.digest
    digest = hashlib.sha256(repr((adapter, replace(request.sampling, seed=0))).encode())
    digest.update(array("Q", request.token_ids).tobytes())
    return digest.digest()


class Quarantine:
    """Fingerprints that are refused for a while; of more than `MOST_KEPT` the newest. Pure: readings of a clock."""

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
        return bool(self._until_s) and fingerprint(request) in self._until_s


class Suspects:
    """One at a time is attempted. `async with suspects.lock()` waits for it; leaving gives it up, as does `release`."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    def lock(self) -> "SuspectLock":
        return SuspectLock(self._lock)


class SuspectLock:
    """Given up exactly once: the first call releases it."""

    def __init__(self, lock: asyncio.Lock) -> None:
        self._lock = lock
        self._held = False

    async def __aenter__(self) -> Self:
        await self._lock.acquire()
        self._held = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        if self._held:
            self._held = False
            self._lock.release()


@dataclass(frozen=True, slots=True)
class Scheduling:
    """`attempt_ids` never repeat within this process. `attempts` of a request may fail one after another."""

    cluster: Cluster
    fleet: Fleet
    queue: AdmissionQueue
    attempt_ids: Iterator[int]
    attempts: int = 6
    quarantine: Quarantine = field(default_factory=Quarantine)
    suspects: Suspects = field(default_factory=Suspects)


logger = logging.getLogger(__name__)
_LOOK_S, _LOOKS = 0.05, 20


class Recovery:
    """Of one request."""

    def __init__(
        self, request: PreparedRequest, scheduling: Scheduling, deadline_s: float, may_be_poison: bool = True
    ) -> None:
        """`may_be_poison` False: it is never quarantined, even if workers die of it."""
        self.avoided_prefill: frozenset[str] = frozenset()
        """Workers that the next attempt had better not go to."""
        self.preferred_decode: str | None = None
        """One that was at the last attempt, where it was not that which failed."""
        self._request = request
        self._scheduling = scheduling
        self._deadline_s = deadline_s
        self._may_be_poison = may_be_poison

    def refuse_poison(self) -> None:
        """Raises: Internal for a request that counts as deadly to its workers."""
        if self._scheduling.quarantine.holds(self._request, time.monotonic()):
            raise self._poisonous()

    async def another(self, failed: Failed, note: AttemptNote | None, tries: Tries, fresh_tokens: int) -> Tries:
        """Returns when it is time for another attempt. Raises: BatonError where there is none.

        `tries` are those before this one, which made so many new tokens.
        """
        request_id, scheduling = self._request.valid.request_id, self._scheduling
        if failed.reason not in RETRYABLE:
            raise error_of(failed, request_id)
        pause_s = tries.after(failed.reason, fresh_tokens, died=False).pause_s(failed.reason, failed.attempt_id)
        await asyncio.sleep(max(0.0, min(pause_s, self._deadline_s - time.monotonic())))
        if failed.reason in ABOUT_A_PAIR and note is not None and note.placement.prefill is not None:
            await self._settled(note.placement.prefill)
        died = self._died(failed, note)
        tries = tries.after(failed.reason, fresh_tokens, died)
        if not died and failed.reason in ABOUT_A_PAIR and note is not None and note.placement.prefill is not None:
            scheduling.cluster.pairs.failed((note.placement.prefill, note.placement.decode), time.monotonic())
        if tries.poisonous and self._may_be_poison:
            scheduling.quarantine.add(fingerprint(self._request), time.monotonic())
            logger.error("request %s is refused from now on, its workers died: %s", request_id, failed.message)
            raise self._poisonous()
        if tries.exhausted(scheduling.attempts):
            raise error_of(failed, request_id)
        logger.info("starting another attempt after %s at %s: %s", failed.reason.name, failed.endpoint, failed.message)
        self._avoid(failed, note, fresh_tokens)
        return tries

    @asynccontextmanager
    async def suspect_lock(self) -> AsyncGenerator[SuspectLock, None]:
        """Waits until no other suspected request is attempted. Raises: DeadlineExceeded."""
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout(self._deadline_s - time.monotonic()):
                    lock = await held.enter_async_context(self._scheduling.suspects.lock())
            except TimeoutError:
                raise DeadlineExceeded("the deadline passed while the request waited to be retried alone") from None
            yield lock

    async def _settled(self, endpoint: str) -> None:
        """Until it is known whether a worker with a broken connection comes back; its session's grace bounds that."""
        for _ in range(_LOOKS):
            worker = self._scheduling.cluster.find(endpoint)
            if worker is None or worker.connected or not worker.held:
                return
            await asyncio.sleep(_LOOK_S)

    def _died(self, failed: Failed, note: AttemptNote | None) -> bool:
        """Whether a worker that was at the attempt is gone; decode may report its prefill worker first."""
        if failed.reason is FailureReason.WORKER_DIED:
            return True
        if failed.reason not in ABOUT_A_PAIR or note is None or note.placement.prefill is None:
            return False
        prefill = self._scheduling.cluster.find(note.placement.prefill)
        return prefill is not None and prefill.died_s is not None and prefill.died_s >= note.placed_s

    def _avoid(self, failed: Failed, note: AttemptNote | None, fresh_tokens: int) -> None:
        """The next attempt goes to another prefill worker where this one failed, or its KV could not be read.

        Its decode worker has nothing to do with that.
        """
        if fresh_tokens >= PROGRESS_TOKENS:
            self.avoided_prefill = frozenset()
        self.preferred_decode = None
        prefill = note.placement.prefill if note is not None else None
        if note is None or prefill is None:
            return
        if failed.endpoint == prefill or failed.reason in ABOUT_A_PAIR:
            self.avoided_prefill |= {prefill}
            self.preferred_decode = note.placement.decode

    def _poisonous(self) -> Internal:
        message = "each worker that computed this request died; it is refused for a while"
        return Internal("POISON", self._request.valid.request_id, message)
