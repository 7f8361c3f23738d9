"""Entry point of all requests, from every transport: validates, tokenises, hashes, generates, and writes the trace.

Every request is counted while it runs, and traced when it has completed. The number of started requests is always the
number of running requests plus that of completed ones.
"""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from types import MappingProxyType

from baton.process.errors import (
    Aborted,
    BatonError,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from baton.process.foreign_text import identifier_fault
from baton.process.objectives import NO_LATENCY_OBJECTIVES, LatencyObjectives
from baton.process.security.api_keys import UNLIMITED
from baton.process.telemetry.trace_context import TraceContext, current_request_id, current_trace
from baton.router.admission.key_limits import KeyMeter, KeyMeters
from baton.router.admission.queue import RETRY_AFTER_S, RequestClass
from baton.router.model.generic_tools import GENERIC
from baton.router.model.served_model import ChosenModel, ServedModel, choose_adapter, served_adapters
from baton.router.model.validation import DrawnValues, validate
from baton.router.readiness import Readiness
from baton.router.request.journal import Beginning, Streams
from baton.router.request.resume import ResumeRequest, check_names, check_received, without_sent
from baton.router.request.run import RequestDeps, RequestRunner
from baton.router.trace.record import (
    ANSWERED,
    CallReader,
    Leave,
    RequestEnd,
    RequestOutcome,
    RequestRecord,
    ShownChange,
    end_of,
    left,
    stages,
)
from baton.router.trace.report import RequestReport, gaps_so_far, is_named, report_of
from baton.router.trace.session_prompts import SessionPrompts
from baton.router.trace.spans import Tracer
from baton.router.types.request import GenerationRequest, Operation, PreparedRequest
from baton.router.types.response import (
    ChoiceFinished,
    Delta,
    Finished,
    ResponseEvent,
    Started,
    Summary,
    Timings,
    Usage,
    is_of_version,
    resume_token,
)
from baton.router.types.worker import Adapter
from baton.text.output.formats.choose import format_of


class RequestCounts:
    """Counts of requests by outcome, and of tokens by model. Tokens of running requests are included."""

    def __init__(self) -> None:
        self.started = 0
        self._running: dict[RequestRecord, None] = {}
        self._ended: Counter[tuple[RequestOutcome, str]] = Counter()
        self._prompt_tokens: Counter[str] = Counter()  # prompt tokens of completed requests, by model
        self._generated_tokens: Counter[str] = Counter()

    def begin(self, record: RequestRecord) -> None:
        self.started += 1
        self._running[record] = None

    def end(self, record: RequestRecord, end: RequestEnd) -> None:
        """Count a completed request. Raises: KeyError if it is not running."""
        del self._running[record]
        self._ended[end.outcome, end.reason] += 1
        self._prompt_tokens[record.model] += record.prompt_tokens
        self._generated_tokens[record.model] += record.completion_tokens

    def refuse(self, end: RequestEnd) -> None:
        """Count a call that was rejected before it became a request."""
        self.started += 1
        self._ended[end.outcome, end.reason] += 1

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def newest_running(self) -> Iterator[RequestRecord]:
        """Running requests, newest first."""
        return reversed(self._running)

    @property
    def running_by_tenant(self) -> Counter[str]:
        return Counter(record.tenant for record in self._running)

    @property
    def ended(self) -> Mapping[tuple[RequestOutcome, str], int]:
        """Numbers of completed requests by outcome and reason."""
        return MappingProxyType(self._ended)

    @property
    def prompt_tokens(self) -> Counter[str]:
        """Dispatched prompt tokens by model. A resumed stream adds none, since the original request counted them."""
        return self._prompt_tokens + _sum({record: record.prompt_tokens for record in self._running})

    @property
    def generated_tokens(self) -> Counter[str]:
        """Tokens delivered to clients, by model. A best-of answer counts all generated tokens."""
        return self._generated_tokens + _sum({record: record.completion_tokens for record in self._running})


def _sum(tokens: Mapping[RequestRecord, int]) -> Counter[str]:
    by_model: Counter[str] = Counter()
    for record, count in tokens.items():
        by_model[record.model] += count
    return by_model


DEADLINE_SLACK_S = 0.02
"""Time before the deadline from which a cancelled call counts as expired: gRPC cancels it by its own clock."""


class Accounts:
    """All requests of this router: counted while they run, traced when they have completed."""

    def __init__(self, tracer: Tracer, counts: RequestCounts | None = None) -> None:
        self._tracer = tracer
        self.counts = counts or RequestCounts()
        self._stopping = False  # True: the router stops and cancels running requests
        self._idle = asyncio.Event()
        self._idle.set()

    async def idle(self) -> None:
        """Wait until all requests have completed.

        If this is cancelled, running requests count as stopped by the router.
        """
        try:
            await self._idle.wait()
        except asyncio.CancelledError:
            self._stopping = True
            raise

    @contextmanager
    def request(
        self, record: RequestRecord, deadline_s: float, reader: CallReader, life: asyncio.Timeout | None
    ) -> Iterator[None]:
        """Count one request for the duration of the context. An exception of the context decides the request's outcome.

        `deadline_s`: monotonic seconds. `life`: see Dispatcher.answer.
        """
        reader.requests += 1
        self._begin(record)
        try:
            yield
            end = ANSWERED
        except (asyncio.CancelledError, GeneratorExit):
            end = self._left(record, deadline_s, reader, life)
            raise
        except BaseException as error:  # requests that end with any exception are counted
            end = end_of(error, record.timeline.attempts > 0)
            raise
        finally:
            self._end(record, end)

    def refuse(self, operation: Operation, parent: TraceContext | None, end: RequestEnd) -> None:
        """Count and trace a call that ended before it became a request."""
        record = RequestRecord.begin(operation, parent)
        self._begin(record)
        self._end(record, end)

    def newest(self, count: int) -> list[RequestReport]:
        """Return up to `count` requests: first running, then completed requests, both newest first. Half of `count` is
        reserved for each kind if it has enough requests. Reports of running requests have no stalls yet.
        """
        now = time.monotonic()
        ended = list(islice(self._tracer.recent.newest(), count))
        running = [
            report_of(record, now, gaps_so_far(record.timeline.gaps))
            for record in islice(self.counts.newest_running, max(count - len(ended), (count + 1) // 2))
        ]
        return [*running, *ended[: count - len(running)]]

    def find(self, given: str) -> RequestReport | None:
        """Return the report of the request that `given` identifies (see `is_named`); None if there is none."""
        for record in self.counts.newest_running:
            request_id = record.prepared.request_id if record.prepared is not None else ""
            if is_named(request_id, record.identity.trace_id, given):
                return report_of(record, time.monotonic(), self._tracer.gaps_of(record))
        return self._tracer.recent.find(given)

    def running_ids(self, tenant: str) -> set[str]:
        """Return the ids of a tenant's running requests that are already prepared."""
        running = (record.prepared for record in self.counts.newest_running)
        return {each.request_id for each in running if each is not None and each.tenant == tenant}

    def _begin(self, record: RequestRecord) -> None:
        self.counts.begin(record)
        self._idle.clear()

    def _end(self, record: RequestRecord, end: RequestEnd) -> None:
        record.end = end
        self.counts.end(record, end)
        if self.counts.running == 0:
            self._idle.set()
        self._tracer.record(record)

    def _left(
        self, record: RequestRecord, deadline_s: float, reader: CallReader, life: asyncio.Timeout | None
    ) -> RequestEnd:
        """Return the outcome of a request whose stream was closed or cancelled."""
        if record.summary is not None:
            return ANSWERED
        if life is not None and life.expired():
            return left(Leave.SUPERSEDED)
        if time.monotonic() >= deadline_s - DEADLINE_SLACK_S:
            return end_of(DeadlineExceeded(), record.timeline.attempts > 0)
        return left(Leave.STOPPING if self._stopping else reader.leaves)


@dataclass(frozen=True, slots=True)
class DispatcherLimits:
    """Limits of every request: its default and maximum deadline, and the number of requests in flight. `objectives`:
    latency objectives of requests without their own.
    """

    default_deadline_s: float
    max_active: int
    objectives: LatencyObjectives = NO_LATENCY_OBJECTIVES


class Dispatcher:
    """Dispatcher that admits, prepares and runs concurrent requests."""

    def __init__(
        self,
        readiness: Readiness,
        scheduling: RequestDeps,
        tracer: Tracer,
        limits: DispatcherLimits,
        streams: Streams,
        meters: KeyMeters | None = None,
        counts: RequestCounts | None = None,
    ) -> None:
        """Create a dispatcher.

        `meters`, `counts`: meters of API keys and counts of requests; None: new ones are created.
        """
        self._readiness = readiness
        self._scheduling = scheduling
        self._limits = limits
        self._streams = streams
        self._meters = meters or KeyMeters()
        self.accounts = Accounts(tracer, counts)
        self._session_prompts = SessionPrompts()
        self.draining = False
        self._stopped = False
        # For each running request that cannot be resumed: the callback that fails it.
        self._ending: dict[RequestRecord, Callable[[BatonError], None]] = {}

    async def drain(self) -> None:
        """Reject new requests and wait until the accepted ones have completed.

        If this call is cancelled, requests that cannot be resumed at another router fail with an error.
        """
        self.draining = True
        try:
            await self.accounts.idle()
        except asyncio.CancelledError:
            self._stopped = True
            for end in list(self._ending.values()):
                end(_router_stopped())
            raise

    @property
    def readiness(self) -> Readiness:
        return self._readiness

    @property
    def queued(self) -> int:
        """Number of pending requests."""
        return self._scheduling.queue.waiting

    def lacks_room_before(self, priority: int) -> bool:
        """Return whether requests with a lower value than `priority` wait for capacity."""
        return self._scheduling.queue.lacks_room_before(priority)

    @property
    def active(self) -> int:
        """Number of in-flight requests, pending ones included."""
        return self.accounts.counts.running

    async def models(self) -> tuple[ChosenModel, ...]:
        """Return the served model, then the model with each of its adapters. Raises: Unavailable."""
        served = await self._readiness.gate.model()
        return (
            ChosenModel(served, self._weights),
            *(ChosenModel(served, adapter) for adapter in self._adapters(served)),
        )

    async def choose(self, model: str) -> ChosenModel:
        """Return the model or adapter named `model`; the model if the name is empty.

        Raises: NotFound, Unavailable, InvalidArgument.
        """
        served = await self._readiness.gate.model()
        if model in ("", served.name):
            return ChosenModel(served, self._weights)
        if fault := identifier_fault(model):
            raise InvalidArgument("model", fault)
        return ChosenModel(served, choose_adapter(model, self._adapters(served)))

    async def load_adapter(self, name: str, path: str, replaces: bool) -> tuple[Adapter, list[str]]:
        """Load an adapter on all workers of the model; see ClusterAdapters.load. Raises: BatonError."""
        served = await self._readiness.gate.model()
        return await self._scheduling.fleet.adapters.load(name, path, replaces, served.name, served.fingerprint)

    async def unload_adapter(self, name: str, wait_s: float) -> list[str]:
        """Unload an adapter on all workers of the model; see ClusterAdapters.unload. Raises: BatonError."""
        return await self._scheduling.fleet.adapters.unload(name, wait_s)

    async def reload(self, path: str, grace_s: float) -> tuple[ChosenModel, list[str]]:
        """Load other weights on all workers of the model, even before it is ready; see ClusterAdapters.reload.

        Raises: BatonError.
        """
        served = self._readiness.gate.served or await self._readiness.gate.model()
        adapters = self._scheduling.fleet.adapters
        weights, worker_ids = await adapters.reload(path, grace_s, served.weights, served.fingerprint)
        return ChosenModel(served, weights), worker_ids

    @property
    def version(self) -> str:
        """Version of the weights that new requests use; empty until a model is loaded."""
        served = self._readiness.gate.served
        return "" if served is None else ChosenModel(served, self._weights).version

    @property
    def tool_format(self) -> str:
        """Name of the format of tool calls; "generic" if the chat template shows no tools; empty if unknown."""
        served = self._readiness.gate.served
        template = served.tokenizer.chat_template if served is not None else None
        if template is None:
            return ""
        found = format_of(template)
        return GENERIC if not template.shows_tools else "" if found is None else found.name

    @property
    def _weights(self) -> Adapter | None:
        return self._scheduling.fleet.adapters.open_requests.weights

    def _adapters(self, served: ServedModel) -> tuple[Adapter, ...]:
        if self._weights is not None:
            return ()  # adapters fit only the weights that workers were started with, which were replaced
        listed = self._scheduling.fleet.adapters.listed
        return served_adapters(self._scheduling.cluster.workers, served.fingerprint, self._readiness.needed, listed)

    async def answer(
        self,
        request: GenerationRequest | ResumeRequest,
        time_left_s: float | None,
        parent: TraceContext | None,
        life: asyncio.Timeout | None = None,
        reader: CallReader | None = None,
    ) -> AsyncGenerator[ResponseEvent, None]:
        """Yield one Started, PromptParts, Deltas, and one Finished per choice. A resumed stream: only unsent ones.

        Closing the iterator cancels the request. `life` expires when another stream of the same request begins; None:
        the stream cannot be resumed. `reader`: state of the client's call, shared by its requests. Raises: BatonError.
        """
        asked = request.request if isinstance(request, ResumeRequest) else request
        record = RequestRecord.begin(asked.operation if asked is not None else Operation.GENERATE, parent)
        record.is_streamed = asked is None or asked.is_streamed
        record.tenant = request.tenant
        record.not_acted_upon = reader.not_acted_upon if reader is not None else ()
        current_trace.set(record.identity)  # so that log lines of router and workers have the same trace id
        limit_s = self._limits.default_deadline_s
        deadline_s = record.timeline.arrived_s + (limit_s if time_left_s is None else min(limit_s, time_left_s))
        with self.accounts.request(record, deadline_s, reader or CallReader(), life), ExitStack() as held:
            meter = self._admit(asked, record)
            if meter is not None:
                held.callback(meter.end)
            beginning = await self._prepared(request, record, deadline_s)
            if meter is not None:
                meter.charge_prompt(len(beginning.request.token_ids), time.monotonic())
            entry = held.enter_context(self._streams.open(beginning, life, deadline_s))
            generation = self._generation(beginning, record, deadline_s)
            open_requests, own_weights = self._scheduling.fleet.adapters.open_requests, beginning.chosen.served.weights
            held.enter_context(open_requests.using(beginning.request.adapter, own_weights, generation.supersede))
            if life is None:
                self._ending[record] = generation.supersede
                held.callback(self._ending.pop, record)
                if self._stopped:
                    generation.supersede(_router_stopped())
            # Started is withheld until the first event: a client that has not received it may safely retry.
            started: Started | None = _started(beginning)
            async with aclosing(generation.events(entry)) as events:
                async for event in events:
                    if started is not None:
                        yield started
                        started = None
                    if isinstance(event, Delta):
                        record.delivered_tokens += len(event.token_ids)
                        if meter is not None:
                            meter.charge_answer(len(event.token_ids), time.monotonic())
                    if isinstance(event, ChoiceFinished):
                        yield self._finished(event, beginning, record)
                    else:
                        yield event

    def _admit(self, asked: GenerationRequest | None, record: RequestRecord) -> KeyMeter | None:
        """Charge the request to its API key. Return the key's meter; None if it has no limits. Raises: BatonError."""
        if self.active > self._limits.max_active:
            message = f"{self._limits.max_active} requests are in flight, the maximum; retry later"
            raise ResourceExhausted(message, self._scheduling.queue.forecast.retry_after_s(), "max_active")
        if self.draining:
            raise Unavailable("the router is draining; retry", "DRAINING", RETRY_AFTER_S)
        # A request that is resumed from its journal record alone was charged when it was first sent.
        if asked is None or asked.limits == UNLIMITED:
            return None
        return self._meters.begin(asked.tenant, asked.limits, record.timeline.arrived_s)

    async def _prepared(
        self, request: GenerationRequest | ResumeRequest, record: RequestRecord, deadline_s: float
    ) -> Beginning:
        try:
            async with asyncio.timeout(deadline_s - time.monotonic()):
                beginning = await self._begin(request, deadline_s)
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed before the request was placed") from None
        record.prepared = beginning.request
        record.model, record.operation = beginning.chosen.name, beginning.request.operation
        record.version = beginning.chosen.version
        record.is_resumed = beginning.resumption is not None
        record.timeline.tokenised_s = time.monotonic()
        if not record.is_resumed and (change := self._session_prompts.compare(beginning.request)) is not None:
            text = await beginning.chosen.served.tokenizer.decode(change.token_ids, False)
            record.prompt_change = ShownChange(change.at, text)
        return beginning

    async def _begin(self, request: GenerationRequest | ResumeRequest, deadline_s: float) -> Beginning:
        """Prepare a new or resumed request. Raises: BatonError."""
        if isinstance(request, ResumeRequest):
            return await self._begin_again(request)
        # A request that would miss its deadline is rejected before it is tokenised.
        self._scheduling.queue.forecast.refuse_late(RequestClass(request.tenant, request.priority, deadline_s))
        chosen, prepared = await self._chosen(request)
        token = resume_token(chosen.version)
        return Beginning(prepared, chosen, request.tenant, token, shown_tokens=request.shown_tokens)

    async def _chosen(self, request: GenerationRequest) -> tuple[ChosenModel, PreparedRequest]:
        """Prepare a request, and repeat this if weights are replaced during the preparation. Raises: BatonError."""
        while True:
            weights = self._weights
            chosen = await self.choose(request.model)
            prepared = await self._prepare(request, chosen)
            if weights == self._weights:
                return chosen, prepared

    def _generation(self, beginning: Beginning, record: RequestRecord, deadline_s: float) -> RequestRunner:
        generation = RequestRunner(
            beginning.request,
            self._scheduling,
            record.timeline,
            partial(beginning.chosen.served.tokenizer.detokenizer, beginning.shown_tokens),
            deadline_s,
            record.identity.traceparent,
            resumption=beginning.resumption,
        )
        record.answer, record.released = generation.answer, generation.released
        return generation

    def _finished(self, choice: ChoiceFinished, beginning: Beginning, record: RequestRecord) -> Finished:
        record.finish_reasons.append(choice.reason.name.lower())
        record.ended_choices.append(choice.index)
        if len(record.finish_reasons) == beginning.choices:
            record.summary = self._summary(beginning.request, record)
        return Finished(choice, record.summary)

    async def _begin_again(self, asked: ResumeRequest) -> Beginning:
        """Prepare a resumed request from its journal record, or from the original request that the client sent again.

        Raises: BatonError.
        """
        check_names(asked)
        current_request_id.set(asked.request_id)
        served = await self._readiness.gate.model()
        record = await self._streams.find(asked, served.block_tokens, served.groups)
        chosen: ChosenModel | None = None
        if record is not None:
            adapter = record.request.adapter  # it may have been unloaded since the record was written
            adapters = self._scheduling.fleet.adapters
            if (gone := adapters.open_requests.gone(adapter)) is not None:
                raise gone
            if record.request.fingerprint != served.fingerprint or not adapters.can_compute(adapter):
                record = None  # the model has changed: the record is useless
            else:
                chosen = ChosenModel(served, adapter)
        if record is not None and chosen is not None:
            prepared = record.request
        elif asked.request is not None:
            chosen, prepared = await self._chosen(replace(asked.request, request_id=asked.request_id))
            self._check_version(asked, chosen)
        else:
            raise NotFound("stream", asked.request_id)
        received = check_received(asked, prepared, served.vocab_size)
        resumption = self._streams.resumption(received, record)
        return Beginning(
            without_sent(prepared, received),
            chosen,
            asked.tenant,
            asked.resume_token,
            resumption,
            record,
            asked.request.shown_tokens if asked.request is not None else frozenset(),
        )

    def _check_version(self, asked: ResumeRequest, chosen: ChosenModel) -> None:
        """Check that the weights that began the answer are still in use. Raises: Aborted."""
        if self._weights is not None and asked.choices and not is_of_version(asked.resume_token, chosen.version):
            message = "the weights of this request were replaced and its record has expired; send it again"
            raise Aborted(message, "MODEL_REPLACED")

    async def _prepare(self, request: GenerationRequest, chosen: ChosenModel) -> PreparedRequest:
        served = chosen.served
        drawn = DrawnValues(request_id=f"req-{secrets.token_hex(8)}", seed=secrets.randbits(63))
        given = "" if identifier_fault(request.request_id) else request.request_id
        current_request_id.set(given or drawn.request_id)  # set before validation, for log lines of rejected requests
        allowed_tokens = request.limits.max_context_tokens
        max_context = served.max_context(allowed_tokens)
        if request.pooling is None:
            served.check_answers()
        valid = validate(request, served.defaults, served.vocab_size, max_context, drawn)
        valid = replace(valid, objectives=self._limits.objectives.replaced_by(request.objectives))
        return await served.prepare(valid, chosen.adapter, allowed_tokens)

    def _summary(self, prepared: PreparedRequest, record: RequestRecord) -> Summary:
        timeline = record.timeline
        kv_received, placement = timeline.last_kv_received, timeline.placement
        return Summary(
            usage=Usage(
                prompt_tokens=len(prepared.token_ids),
                completion_tokens=record.answer.completion_tokens if record.answer is not None else 0,
                cached_tokens=timeline.prefill.cached_tokens if timeline.prefill else 0,
            ),
            timings=Timings(
                stages=stages(timeline, time.monotonic()),
                transfer_bytes=kv_received.transferred_bytes if kv_received else 0,
                transport=kv_received.transport if kv_received else "",
                prefill_pid=self._pid(placement.computing) if placement else 0,
                decode_pid=self._pid(placement.decode) if placement else 0,
            ),
            pooled=timeline.pooled,
            version=record.version,
        )

    def _pid(self, endpoint: str) -> int:
        worker = self._scheduling.cluster.find(endpoint)
        return worker.description.pid if worker is not None and worker.description is not None else 0


def _router_stopped() -> Unavailable:
    return Unavailable("the router stopped before the answer was complete; retry", "ROUTER_STOPPED", RETRY_AFTER_S)


def _started(beginning: Beginning) -> Started:
    valid, token_ids = beginning.request, beginning.request.token_ids
    chosen, resume_token = beginning.chosen, beginning.resume_token
    seed, version = valid.sampling.seed, chosen.version
    return Started(valid.request_id, chosen.name, len(token_ids), seed, token_ids, resume_token, version)
