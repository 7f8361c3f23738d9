"""The one way in, whatever the transport: validate, tokenise, hash, generate, and write the trace at the end."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from router.adapters import choose_adapter, served_adapters
from router.admission import Standing
from router.answer import ChoiceFinished, Delta
from router.generation import Generation, Scheduling
from router.key_limits import KeyMeters, Meter
from router.readiness import Readiness
from router.refusals import RETRY_AFTER_S
from router.request import GenerationRequest, PreparedRequest
from router.response import Finished, ResponseEvent, Started, Summary, Timings, Usage
from router.served_model import ChosenModel, ServedModel
from router.timeline import stages
from router.tracing import RequestRecord, Tracer
from router.validation import MAX_REQUEST_ID_CHARACTERS, Drawn, validate
from router.worker import Adapter
from service.errors import BatonError, DeadlineExceeded, ResourceExhausted, Unavailable
from service.trace_context import TraceContext, current_request_id


@dataclass(frozen=True, slots=True)
class DispatcherLimits:
    default_deadline_s: float
    max_active: int


class Dispatcher:
    """Answers requests; many at once."""

    def __init__(self, readiness: Readiness, scheduling: Scheduling, tracer: Tracer, limits: DispatcherLimits) -> None:
        self._readiness = readiness
        self._scheduling = scheduling
        self._tracer = tracer
        self._limits = limits
        self._meters = KeyMeters()
        self.active = 0
        """Requests accepted and not yet finished."""
        self.draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def drain(self) -> None:
        """Refuses new requests and returns when the accepted ones have ended."""
        self.draining = True
        await self._idle.wait()

    async def models(self) -> tuple[ChosenModel, ...]:
        """The model that is served, and with each of its adapters. Raises: Unavailable."""
        served = await self._readiness.served()
        return (ChosenModel(served), *(ChosenModel(served, adapter) for adapter in self._adapters(served)))

    async def choose(self, model: str) -> ChosenModel:
        """The model, or the adapter, of that name; the model where it is empty. Raises: NotFound, Unavailable."""
        served = await self._readiness.served()
        return ChosenModel(served, choose_adapter(model, served.name, self._adapters(served)))

    def _adapters(self, served: ServedModel) -> tuple[Adapter, ...]:
        return served_adapters(self._scheduling.cluster.workers, served.fingerprint, self._readiness.needed)

    async def answer(
        self, request: GenerationRequest, time_left_s: float | None, parent: TraceContext | None
    ) -> AsyncGenerator[ResponseEvent, None]:
        """One Started, PromptParts, Deltas, one Finished per choice. Closing it cancels all. Raises: BatonError."""
        if self.active >= self._limits.max_active:
            retry_after_s = self._scheduling.queue.retry_after_s()
            raise ResourceExhausted(f"{self.active} requests are active already", retry_after_s)
        if self.draining:
            raise Unavailable("the router is draining", "DRAINING", RETRY_AFTER_S)
        record = RequestRecord.begin(request.operation, parent)
        meter = self._meters.begin(request.tenant, request.limits, record.timeline.arrived_s)
        self.active += 1
        self._idle.clear()
        try:
            async with aclosing(self._answer(request, record, time_left_s, meter)) as events:
                async for event in events:
                    yield event
        except BatonError as error:
            record.error = error.code.name
            raise
        except (asyncio.CancelledError, GeneratorExit):
            record.error = None if record.summary else "CANCELLED"
            raise
        finally:
            self.active -= 1
            if meter is not None:
                meter.end()
            if self.active == 0:
                self._idle.set()
            self._tracer.record(record)

    async def _answer(
        self, request: GenerationRequest, record: RequestRecord, time_left_s: float | None, meter: Meter | None
    ) -> AsyncGenerator[ResponseEvent, None]:
        limit_s = self._limits.default_deadline_s
        deadline_s = record.timeline.arrived_s + (limit_s if time_left_s is None else min(limit_s, time_left_s))
        # Before anything is spent on it, tokenising included.
        self._scheduling.queue.refuse_hopeless(Standing(request.tenant, request.priority, deadline_s))
        try:
            async with asyncio.timeout(deadline_s - time.monotonic()):
                chosen = await self.choose(request.model)
                prepared = record.prepared = await self._prepare(request, chosen)
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed before the request was placed") from None
        record.model = chosen.name
        record.timeline.tokenised_s = time.monotonic()
        if meter is not None:
            meter.charge_prompt(len(prepared.token_ids), record.timeline.tokenised_s)
        generation = Generation(
            prepared,
            self._scheduling,
            record.timeline,
            chosen.served.tokenizer.detokenizer,
            deadline_s,
            record.identity.traceparent,
        )
        # Started goes out with the first token: before it, a client may safely try again.
        started: Started | None = Started(
            prepared.valid.request_id,
            chosen.name,
            len(prepared.token_ids),
            prepared.valid.seed,
            prepared.token_ids,
        )
        async with aclosing(generation.events()) as events:
            async for event in events:
                if meter is not None and isinstance(event, Delta):
                    meter.charge_answer(len(event.token_ids), time.monotonic())
                if started is not None:
                    yield started
                    started = None
                if not isinstance(event, ChoiceFinished):
                    yield event
                    continue
                record.finish_reasons.append(event.reason.name.lower())
                last = len(record.finish_reasons) == prepared.valid.n
                record.summary = self._summary(prepared, generation) if last else None
                yield Finished(event, record.summary)

    async def _prepare(self, request: GenerationRequest, chosen: ChosenModel) -> PreparedRequest:
        served = chosen.served
        drawn = Drawn(request_id=f"req-{secrets.token_hex(8)}", seed=secrets.randbits(63))
        current_request_id.set(request.request_id[:MAX_REQUEST_ID_CHARACTERS] or drawn.request_id)  # refusals too
        allowed_tokens = request.limits.max_context_tokens
        max_context = served.max_context(allowed_tokens)
        valid = validate(request, served.defaults, served.vocab_size, max_context, drawn)
        return await served.prepare(valid, chosen.adapter, allowed_tokens)

    def _summary(self, prepared: PreparedRequest, generation: Generation) -> Summary:
        timeline = generation.timeline
        landed, placement = timeline.landed, timeline.placement
        return Summary(
            usage=Usage(
                prompt_tokens=len(prepared.token_ids),
                completion_tokens=generation.answer.completion_tokens,
                cached_tokens=timeline.prefill.cached_tokens if timeline.prefill else 0,
            ),
            timings=Timings(
                stages=stages(timeline, time.monotonic()),
                transfer_bytes=landed.transferred_bytes if landed else 0,
                transport=landed.transport if landed else "",
                prefill_pid=self._pid(placement.prefill or placement.decode) if placement else 0,
                decode_pid=self._pid(placement.decode) if placement else 0,
            ),
        )

    def _pid(self, endpoint: str) -> int:
        worker = self._scheduling.cluster.find(endpoint)
        return worker.description.pid if worker is not None and worker.description is not None else 0
