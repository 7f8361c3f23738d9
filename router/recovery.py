"""How a request continues when an attempt has failed: with its error, or another attempt, when and where."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

from router.events import Failed, FailureReason
from router.explanation import AttemptNote
from router.failures import ABOUT_A_PAIR, RETRYABLE, error_of
from router.poison import Turn, fingerprint
from router.replay import PROGRESS_TOKENS, Tries
from router.request import PreparedRequest
from router.scheduling import Scheduling
from service.errors import DeadlineExceeded, Internal

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
    async def turn(self) -> AsyncGenerator[Turn, None]:
        """Waits until no other suspected request is attempted. Raises: DeadlineExceeded."""
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout(self._deadline_s - time.monotonic()):
                    turn = await held.enter_async_context(self._scheduling.suspects.turn())
            except TimeoutError:
                raise DeadlineExceeded("the deadline passed while the request waited to be retried alone") from None
            yield turn

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
