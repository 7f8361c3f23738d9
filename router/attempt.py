"""One attempt at a request on its workers: its resources there, its events from there, and its release."""

import asyncio
from collections import deque
from types import TracebackType
from typing import Self

from router import session_wire
from router.cluster import Cluster
from router.events import Failed, FailureReason, FirstStep, Landed, PrefillTimings, PromptScores, SequenceOutput
from router.failures import PREFILL_GONE, AttemptFailed
from router.fleet import Fleet
from router.inbox import Arrival
from router.lifecycle import InconsistentOutput, Lifecycle, Released
from router.placement import Placement
from router.request import PreparedRequest
from router.timeline import Timeline

_LANDED_WAIT_S = 0.1  # Landed travels beside the tokens; it may come just after the last


class Attempt:
    """Owns the charges and the work on its workers until it is left (`with`); then it cancels what they still hold."""

    def __init__(
        self,
        attempt_id: int,
        placement: Placement,
        request: PreparedRequest,
        cluster: Cluster,
        fleet: Fleet,
        timeline: Timeline,
        lifecycle: Lifecycle,
    ) -> None:
        """`lifecycle` is the request's, and begins this attempt. `request` may be a part of it (router/replay.py)."""
        self.attempt_id = attempt_id
        self.placement = placement
        self._request = request
        self._cluster = cluster
        self._fleet = fleet
        self._timeline = timeline
        self._lifecycle = lifecycle
        lifecycle.begin(attempt_id, request.choices)
        self._outputs: deque[SequenceOutput] = deque()
        self._scores: deque[PromptScores] = deque()
        self._unscored = 0 if request.sampling.prompt_logprobs is None else len(request.token_ids) - 1
        self._unfinished = set(request.choices)  # those that may still be running on decode
        # Those of which no worker has sent anything; of a search decode sends all, at its end.
        self._unheard = set() if request.sampling.beams is not None else set(request.choices)
        self._prefill_holds = False
        self._decode_holds = False
        self._has_landed = False

    def __enter__(self) -> Self:
        self._inbox = self._fleet.open(self.attempt_id, self.placement)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        placement = self.placement
        self._fleet.close(self.attempt_id)
        self._lifecycle.leave(self.attempt_id)
        if self._decode_holds:
            self._fleet.cancel(self.attempt_id, placement.decode, keep_landed=self._prefill_is_gone(error))
        if self._prefill_holds and placement.prefill is not None:
            self._fleet.cancel(self.attempt_id, placement.prefill)
        for endpoint in placement.endpoints:
            self._cluster.release(self.attempt_id, endpoint)
        self._fleet.on_change()

    def _prefill_is_gone(self, error: BaseException | None) -> bool:
        if not isinstance(error, AttemptFailed) or error.failed.endpoint != self.placement.prefill:
            return False
        return error.failed.reason in PREFILL_GONE

    def dispatch(self, tag: session_wire.Tag) -> None:
        self._prefill_holds = self.placement.prefill is not None
        self._decode_holds = True
        self._fleet.dispatch(tag, self._request, self.placement)

    def adopt(self, tag: session_wire.Tag, router_id: bytes, attempt_id: int) -> None:
        """Instead of `dispatch`: continues an attempt that the decode worker makes for another router."""
        self._decode_holds = True
        self._fleet.adopt(tag, router_id, attempt_id, self.placement.decode)

    def expire(self) -> None:
        """The deadline has passed: `next` raises TimeoutError from now on."""
        self._inbox.expire()

    async def next(self) -> PromptScores | tuple[Released, ...]:
        """All scores of the prompt, where they are asked for; then the next tokens in order, of some choices.

        All that has come since the last call comes at once: a slow reader gets more at a time. Raises:
        AttemptFailed, InconsistentOutput, TimeoutError.
        """
        while True:
            if self._scores:
                return self._scores.popleft()
            if self._outputs and not self._unscored:  # tokens from decode may overtake prefill's scores
                released = self._lifecycle.take_all(self._outputs)
                if released:
                    return released
            self._take(await self._inbox.take())
            # Outputs that came before a failure go out before it.
            while (first := self._inbox.first) is not None and not isinstance(first.event, Failed):
                self._take(self._inbox.take_first())

    async def landing(self) -> None:
        """Waits a moment for Landed where it is still due: an answer that decode ended comes with its timings."""
        if self._decode_holds or self.placement.prefill is None or self._has_landed:
            return
        try:
            async with asyncio.timeout(_LANDED_WAIT_S):
                while not self._has_landed:
                    self._take(await self._inbox.take())
        except (TimeoutError, AttemptFailed):
            return  # the answer is complete; only its timings are not

    def _take(self, arrival: Arrival) -> None:
        match arrival.event:
            case SequenceOutput() as output:
                offset = output.offset - self._request.answered_tokens
                self._timeline.take_decode_output(output.choice, offset, len(output.token_ids), arrival.at_s)
                self._unheard.discard(output.choice)
                self._take_decode_end(output)
                self._outputs.append(output)
            case PromptScores() as scores:
                self._take_scores(scores)
            case FirstStep() as first_step:
                self._take_first_step(first_step, arrival.at_s)
            case Landed() as landed:
                self._has_landed = True
                self._timeline.take_landed(landed)
                placement = self.placement
                self._cluster.caches.audit(placement.decode, placement.decode_hit_tokens, landed.cached_tokens)
                moved_tokens = len(self._request.token_ids) - landed.cached_tokens
                self._cluster.rates.transferred(moved_tokens, landed.transferred_bytes)
                self._prefill_holds = False
                if placement.prefill is not None:
                    self._cluster.pairs.succeeded((placement.prefill, placement.decode))
            case Failed() as failed:
                self._take_failure(failed)

    def _take_scores(self, scores: PromptScores) -> None:
        if scores.offset != len(self._request.token_ids) - self._unscored or len(scores.logprobs) > self._unscored:
            raise InconsistentOutput(
                f"prompt log-probabilities begin at token {scores.offset}; the last {self._unscored} are missing"
            )
        self._unscored -= len(scores.logprobs)
        self._scores.append(scores)

    def _take_first_step(self, first_step: FirstStep, now: float) -> None:
        self._timeline.take_first_step(first_step, now)
        self._unfinished.difference_update(o.choice for o in first_step.outputs if o.end is not None)
        self._unheard.clear()
        self._audit(first_step.timings)
        self._learn(first_step.timings)
        if self.placement.prefill is not None:
            self._cluster.release(self.attempt_id, self.placement.prefill)
        else:
            self._cluster.prompt_computed(self.attempt_id, self.placement.decode)
            if not self._unfinished:
                self._decode_holds = False  # it made this step, so it knows that the answer has ended
        self._outputs.extend(first_step.outputs)

    def _learn(self, timings: PrefillTimings) -> None:
        """Learns a prefill worker's rate. A decode worker computes prompts beside answers, and reports its own."""
        if self.placement.prefill is not None:
            computed_tokens = len(self._request.token_ids) - timings.cached_tokens
            self._cluster.rates.computed(self.placement.prefill, computed_tokens, sum(timings.chunk_ms))

    def _audit(self, timings: PrefillTimings) -> None:
        placement, found_tokens = self.placement, timings.cached_tokens - timings.fetched_tokens
        if placement.prefill is not None:
            self._cluster.caches.audit(placement.prefill, placement.prefill_hit_tokens, found_tokens)
        else:
            self._cluster.caches.audit(placement.decode, placement.decode_hit_tokens, found_tokens)

    def _take_decode_end(self, output: SequenceOutput) -> None:
        if output.end is not None:
            self._unfinished.discard(output.choice)
            if not self._unfinished:
                self._decode_holds = False

    def _take_failure(self, failed: Failed) -> None:
        """Once the KV has landed, and the prompt's scores have come, prefill's troubles are not this request's.

        Unless prefill alone knew of a choice: one that ended with its first token never reaches decode.
        """
        if failed.endpoint == self.placement.prefill:
            self._prefill_holds = False
            if self._has_landed and not self._unscored and not self._unheard:
                return
        else:
            self._decode_holds = False
        if failed.reason is FailureReason.DRAINING:
            self._fleet.drains(failed.endpoint)
        raise AttemptFailed(failed)
