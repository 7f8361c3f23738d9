"""One request from its tokens to its end: waits for room, dispatches, follows the answer, retries.

continues with another one.

Tokens that were given out are final, and are part of the next attempt's prompt (see retry.py). Detokenisers, stop
strings and counts are those of the request, and know nothing of attempts.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from types import MappingProxyType
from typing import TypeVar

from baton.generation.detokenizer import Detokenizer
from baton.router.admission.queue import RETRY_AFTER_S
from baton.router.request.answer import Answer, BestOf, PromptEcho
from baton.router.request.attempt import AttemptDispatcher, adopt, location_of, placed, within_reach
from baton.router.request.journal import AttemptLocation, Entry, journaled
from baton.router.request.resume import ResumeFilter, Resumption, adoptable
from baton.router.request.retry import PROGRESS_TOKENS, AttemptFailed, Recovery, Scheduling, Tries, end_of, replays
from baton.router.request.tokens import InconsistentOutput, NotRepeated, TokenStream
from baton.router.trace.record import AnswerStream
from baton.router.trace.timeline import Timeline
from baton.router.types.events import NewTokens, PromptScores, TokenLogprob
from baton.router.types.request import PreparedRequest
from baton.router.types.response import AnswerEvent, PromptPart
from baton.service.errors import DeadlineExceeded, Internal, Unavailable

Item = TypeVar("Item")


async def merged(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    """Until all have ended. The first error of one ends all of them, as does closing this.

    A reader that is slow holds them up: of each, one item at most waits here.
    """
    awaited = {asyncio.create_task(_next(stream)): stream for stream in streams}
    try:
        while awaited:
            come, _ = await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            for task in come:
                stream = awaited.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                awaited[asyncio.create_task(_next(stream))] = stream
                yield item
    finally:
        for task in awaited:
            task.cancel()
        await asyncio.gather(*awaited, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _next(stream: AsyncGenerator[Item, None]) -> Item:
    return await anext(stream)


logger = logging.getLogger(__name__)

_UNSCORED = TokenLogprob(float("nan"), ())  # of a token that another router gave out


class Generation:
    """Follows one request; `answer` and `timeline` may be read at any time."""

    def __init__(
        self,
        request: PreparedRequest,
        scheduling: Scheduling,
        timeline: Timeline,
        new_detokenizer: Callable[[], Detokenizer],
        deadline_s: float,
        traceparent: str = "",
        is_usual: bool = True,
        received: Mapping[int, tuple[int, ...]] = MappingProxyType({}),
        resumption: Resumption | None = None,
        entry: Entry | None = None,
    ) -> None:
        """`deadline_s` is a reading of the monotonic clock. `is_usual`: it is a client's request, and its duration
        predicts that of others.

        `received`: by choice, the tokens that another router gave out of an answer. They are sent again; with
        `resumption`, only those that the client does not have. `entry`: where to record the request's workers.
        """
        sampling = request.sampling
        valid = request.valid
        made = Answer(sampling.n, valid.stop, sampling.min_tokens, new_detokenizer)
        self.answer: AnswerStream = BestOf(made, valid.n, valid.logprobs is not None) if sampling.n > valid.n else made
        self._resumption = resumption
        if resumption is not None:
            self.answer = ResumeFilter(self.answer, valid.n, resumption.received)
            received = resumption.carried(request)
        self._entry = entry
        self.timeline = timeline
        timeline.streams = valid.streams
        self._request = request
        self._scheduling = scheduling
        self._is_usual = is_usual
        self._stream = TokenStream(sampling.n)
        scored = sampling.prompt_logprobs is not None
        sent_tokens = resumption.received.prompt_tokens if resumption is not None else 0
        echo = PromptEcho(request.token_ids, request.echo_text, scored, sent_tokens)
        self._echo = echo if scored or valid.echo else None
        self._recovery = Recovery(request, scheduling, deadline_s, may_be_poison=is_usual)
        self._attempts = AttemptDispatcher(
            request, scheduling, timeline, self._stream, self._recovery, deadline_s, traceparent, resumption
        )
        self._received = received

    def events(self) -> AsyncGenerator[AnswerEvent | PromptPart, None]:
        """Deltas and ends of the choices, as they come; `answer.done` turns true before the last of them.

        Where the prompt is to be sent back, it comes before the first of them.

        Closing this iterator, at any time, frees everything on all workers. Raises: BatonError.
        """
        self._recovery.refuse_poison()
        resumes = self._resumption is not None or any(self._received.values())
        return self._resume() if resumes else self._follow(self._request, Tries())

    async def _resume(self) -> AsyncGenerator[AnswerEvent | PromptPart, None]:
        for choice, token_ids in self._received.items():
            unscored = (_UNSCORED,) * len(token_ids) if self._request.sampling.logprobs is not None else ()
            for event in self.answer.take(self._stream.prime(choice, token_ids)._replace(logprobs=unscored)):
                yield event
        locations: Sequence[AttemptLocation] = ()
        if self._resumption is not None and not self.answer.done:
            locations = await within_reach(adoptable(self._request, self._resumption), self._scheduling)
        async with aclosing(self._go_on(self._request, Tries(), locations)) as events:
            async for further in events:
                yield further

    async def _go_on(
        self, part: PreparedRequest, tries: Tries, locations: Sequence[AttemptLocation] = ()
    ) -> AsyncGenerator[AnswerEvent | PromptPart, None]:
        """The rest of a part, each choice by itself where some of it is out, and where it is made already."""
        ended, parts = self._left(part)
        for event in ended:
            yield event
        streams = [self._follow(each, tries, location) for each, location in placed(self._request, parts, locations)]
        async with aclosing(streams[0] if len(streams) == 1 else merged(streams)) as events:
            async for further in events:
                yield further

    async def _follow(
        self, part: PreparedRequest, tries: Tries, location: AttemptLocation | None = None
    ) -> AsyncGenerator[AnswerEvent | PromptPart, None]:
        """The request, or a part of it, over as many attempts as it takes; the first of them where it is made."""
        while True:
            released = self._released(part)
            try:
                async with AsyncExitStack() as held:
                    lock = await held.enter_async_context(self._recovery.suspect_lock()) if tries.suspect else None
                    events = await held.enter_async_context(aclosing(self._attempt(part, location)))
                    async for event in events:
                        if lock is not None and self._fresh_tokens(part, released) >= PROGRESS_TOKENS:
                            lock.release()
                        yield event
                return
            except AttemptFailed as failure:
                failed = failure.failed
            except NotRepeated as error:
                message = "a worker failed, and another one did not repeat the token that had gone out"
                raise Unavailable(message, "NOT_REPEATED", RETRY_AFTER_S) from error
            except InconsistentOutput as error:
                logger.exception("a worker broke the protocol")
                raise Internal("INCONSISTENT_OUTPUT", self._request.valid.request_id) from error
            location, note = None, self.timeline.take_failure(failed, time.monotonic())
            tries = await self._recovery.another(failed, note, tries, self._fresh_tokens(part, released))
            if len(part.choices) > 1:
                async with aclosing(self._go_on(part, tries)) as further:
                    async for event in further:
                        yield event
                return
            ended, parts = self._left(part)
            for event in ended:
                yield event
            if not parts:
                return
            part = parts[0]

    def _released(self, part: PreparedRequest) -> list[int]:
        return [self._stream.released(choice) for choice in part.choices]

    def _fresh_tokens(self, part: PreparedRequest, before: list[int]) -> int:
        """Most of any choice, since so many were released."""
        return max(now - then for now, then in zip(self._released(part), before, strict=True))

    def _left(self, part: PreparedRequest) -> tuple[Sequence[AnswerEvent], tuple[PreparedRequest, ...]]:
        """Of a part whose attempt failed: the ends that were reached all the same, and the parts still to be made."""
        sampling, stream = self._request.sampling, self._stream
        ended: list[AnswerEvent] = []
        answers: dict[int, tuple[int, ...]] = {}
        for choice in part.choices:
            if self.answer.has_finished(choice):
                continue
            answered = stream.answer(choice)
            end = end_of(sampling, answered) if sampling.beams is None else None
            if end is None:
                answers[choice] = answered
            else:
                ended += self.answer.take(stream.finish(choice, end))
        if self.answer.done:
            self.timeline.ended_s = time.monotonic()
        return ended, replays(self._request, part, answers)

    async def _attempt(
        self, part: PreparedRequest, location: AttemptLocation | None
    ) -> AsyncGenerator[AnswerEvent | PromptPart, None]:
        events: Sequence[AnswerEvent | PromptPart] = ()
        shared = (self._scheduling, self.timeline, self._stream)
        attempt = await self._attempts.place(part) if location is None else adopt(location, part, *shared)
        with attempt, journaled(self._entry, location_of(attempt, part, location)):
            deadline = asyncio.get_running_loop().call_later(self._attempts.time_left_s(), attempt.expire)
            try:
                self._attempts.dispatch(attempt, location)
                while not self._is_done(part):
                    events = self._take(await attempt.next())
                    if not self._is_done(part):
                        for event in events:
                            yield event
                await attempt.wait_for_kv()
            except TimeoutError:
                raise DeadlineExceeded from None
            finally:
                deadline.cancel()
                is_usual = self._is_usual and not part.answered_tokens
                self._scheduling.queue.ended(attempt.attempt_id, is_usual and self._is_done(part))
            self.timeline.ended_s = time.monotonic()
            asyncio.get_running_loop().call_soon(self._attempts.record_answer, attempt.placement, part)
        for event in events:  # the last ones: the workers are free already, whether or not the client reads on
            yield event

    def _is_done(self, part: PreparedRequest) -> bool:
        """All of it, or the one choice of a part."""
        return self.answer.done or (part is not self._request and self.answer.has_finished(part.first_choice))

    def _take(self, arrived: PromptScores | tuple[NewTokens, ...]) -> Sequence[AnswerEvent | PromptPart]:
        if isinstance(arrived, PromptScores):
            return self._echo.take(arrived) if self._echo is not None else ()
        began_s = time.monotonic()
        parts = self._echo.rest() if self._echo is not None else ()
        events = [event for released in arrived for event in self.answer.take(released)]
        now = time.monotonic()
        self.timeline.detokenise_ms += (now - began_s) * 1e3
        if self.timeline.first_token_s is None and events:
            self.timeline.first_token_s = now
        return [*parts, *events] if parts else events
