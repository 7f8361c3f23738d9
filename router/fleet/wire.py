"""Conversion of link messages between protobuf and plain values. It only maps names and decides nothing."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf.message import Message

from baton.process.registry.worker_record import WorkerRole
from baton.process.telemetry.spans import WallClock
from baton.process.wire_bounds import MAX_EXACT
from baton.protos import cache_pb2, kept_session_pb2, report_pb2, sampling_pb2, session_pb2, versions_pb2
from baton.router.cache import wire as cache_wire
from baton.router.placement.decide import Placement
from baton.router.types.events import (
    Alternative,
    AttemptEvent,
    Drafts,
    Failed,
    FailureReason,
    FirstStep,
    KvReceived,
    Made,
    PrefillTimings,
    PromptScores,
    SequenceEnd,
    SequenceOutput,
    TokenLogprob,
    WorkerGap,
)
from baton.router.types.request import PreparedRequest, Sampling
from baton.router.types.session import KeptSession
from baton.router.types.worker import (
    Adapter,
    KvLink,
    ListedAdapter,
    ModelDescription,
    PoolBlocks,
    SessionReport,
    TierReport,
    WorkerAdapters,
    WorkerDescription,
    WorkerReport,
)
from baton.text.block_groups import ONE_GROUP, BlockGroups
from baton.text.causes import CausePart, StallCause
from baton.text.packed_tokens import field
from baton.text.pooling import Pooling, PoolingKind
from baton.text.sampling import BeamStop, numbers_of
from baton.text.structured.output import StructuredKind, StructuredOutput
from baton.versions import OWN, Versions, announced

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

HandOver = session_pb2.HandOver
Plain = TypeVar("Plain", bound="DataclassInstance")

_ROLES = {session_pb2.ROLE_PREFILL: WorkerRole.PREFILL, session_pb2.ROLE_DECODE: WorkerRole.DECODE}
_ENDS = {session_pb2.END_REASON_STOP: SequenceEnd.STOP, session_pb2.END_REASON_LENGTH: SequenceEnd.LENGTH}
BEAM_STOPS = {
    BeamStop.UNPROMISING: sampling_pb2.BEAM_STOP_UNSPECIFIED,
    BeamStop.FULL: sampling_pb2.BEAM_STOP_FULL,
    BeamStop.NEVER: sampling_pb2.BEAM_STOP_NEVER,
}
STRUCTURED_KINDS = {
    StructuredKind.JSON_SCHEMA: sampling_pb2.STRUCTURED_KIND_JSON_SCHEMA,
    StructuredKind.JSON_OBJECT: sampling_pb2.STRUCTURED_KIND_JSON_OBJECT,
    StructuredKind.REGEX: sampling_pb2.STRUCTURED_KIND_REGEX,
    StructuredKind.GRAMMAR: sampling_pb2.STRUCTURED_KIND_GRAMMAR,
    StructuredKind.CHOICE: sampling_pb2.STRUCTURED_KIND_CHOICE,
    StructuredKind.THOUGHTS: sampling_pb2.STRUCTURED_KIND_THOUGHTS,
}
POOLING_KINDS = {
    PoolingKind.LAST: session_pb2.POOLING_KIND_LAST,
    PoolingKind.MEAN: session_pb2.POOLING_KIND_MEAN,
    PoolingKind.FIRST: session_pb2.POOLING_KIND_CLS,
}
_CAUSES = {
    session_pb2.STALL_CAUSE_PROMPT_TOKENS: StallCause.PROMPTS,
    session_pb2.STALL_CAUSE_LARGER_BATCH: StallCause.BATCH,
    session_pb2.STALL_CAUSE_LONGER_CONTEXTS: StallCause.CONTEXTS,
    session_pb2.STALL_CAUSE_DRAFTED_TOKENS: StallCause.DRAFTS,
    session_pb2.STALL_CAUSE_BLOCK_COPIES: StallCause.COPIES,
    session_pb2.STALL_CAUSE_PREEMPTION: StallCause.PREEMPTION,
    session_pb2.STALL_CAUSE_LATE_MASK: StallCause.MASK,
    session_pb2.STALL_CAUSE_GARBAGE_COLLECTION: StallCause.COLLECTION,
    session_pb2.STALL_CAUSE_INTERPRETER_LOCK: StallCause.LOCK,
    session_pb2.STALL_CAUSE_CPU_WAIT: StallCause.CPU_WAIT,
    session_pb2.STALL_CAUSE_STOPPED: StallCause.STOPPED,
    session_pb2.STALL_CAUSE_SLOWER_COMPUTATION: StallCause.SLOWER,
    session_pb2.STALL_CAUSE_ENGINE_IDLE: StallCause.IDLE,
    session_pb2.STALL_CAUSE_LENT_CORES: StallCause.LENT,
    session_pb2.STALL_CAUSE_WORKER_EVENT_LOOP: StallCause.WORKER_LOOP,
    session_pb2.STALL_CAUSE_ROUTER_EVENT_LOOP: StallCause.ROUTER_LOOP,
    session_pb2.STALL_CAUSE_NETWORK: StallCause.NETWORK,
    session_pb2.STALL_CAUSE_RECOVERY: StallCause.RECOVERY,
}
_FAILURES = {
    session_pb2.FAILURE_REASON_INVALID: FailureReason.INVALID,
    session_pb2.FAILURE_REASON_TRANSFER: FailureReason.TRANSFER,
    session_pb2.FAILURE_REASON_NONFINITE: FailureReason.NONFINITE,
    session_pb2.FAILURE_REASON_DEADLINE: FailureReason.DEADLINE,
    session_pb2.FAILURE_REASON_DRAINING: FailureReason.DRAINING,
    session_pb2.FAILURE_REASON_NO_ROOM: FailureReason.NO_ROOM,
    session_pb2.FAILURE_REASON_UNKNOWN_ATTEMPT: FailureReason.UNKNOWN_ATTEMPT,
    session_pb2.FAILURE_REASON_ADOPTED: FailureReason.ADOPTED,
    session_pb2.FAILURE_REASON_CORRUPT: FailureReason.CORRUPT,
}


@dataclass(frozen=True, slots=True)
class Command:
    """Command to a worker. `prompt`: serialised prompt, which is appended to the serialised message.

    The prompt is packed on another thread: 100 000 tokens take milliseconds, in which all streams would wait.
    """

    message: session_pb2.ConnectRequest
    prompt: bytes = b""

    def to_bytes(self) -> bytes:
        return self.message.SerializeToString() + self.prompt


@dataclass(frozen=True, slots=True)
class Tag:
    """Fields of an attempt's commands that are not part of the request."""

    attempt_id: int
    transfer_id: bytes  # 16 random bytes
    fetch_id: bytes  # 16 random bytes: id of the transfer by which a prefill worker may fetch cached blocks
    time_left_ms: int
    traceparent: str
    request_id: str = ""  # public id of the request
    first_token_in_ms: int | None = None  # time left for the first token; negative: it is late; None: no objective


@dataclass(frozen=True, slots=True)
class ReportArrival:
    """Times at which a worker's report was created and arrived."""

    made_us: int  # creation, on the worker's clock
    came_s: float  # arrival, monotonic


def clock(report: ReportArrival, now: WallClock) -> session_pb2.Clock:
    kept_us = max(0, round((now.monotonic_s - report.came_s) * 1e6))
    return session_pb2.Clock(echo_us=report.made_us, kept_us=kept_us, wall_us=now.wall_ns // 1000)


def hello(router_id: bytes, received: int, resumes_epoch: int) -> Command:
    return Command(
        session_pb2.ConnectRequest(
            hello=session_pb2.Hello(
                router_id=router_id, received=received, resumes_epoch=resumes_epoch, versions=versions_message(OWN)
            )
        )
    )


def pooling_message(pooling: Pooling | None) -> session_pb2.Pooling | None:
    if pooling is None:
        return None
    return session_pb2.Pooling(
        kind=POOLING_KINDS[pooling.kind], head_token_ids=pooling.head_token_ids, second_from=pooling.second_from
    )


def prefill(tag: Tag, request: PreparedRequest, placement: Placement) -> Command:
    """Create the command to compute a prompt on a prefill worker."""
    sampling = sampling_message(request.sampling, computes_prompt=True)
    message = session_pb2.Prefill(
        **_attempt_fields(tag, request), sampling=sampling, fetch=_fetch(tag, request, placement)
    )
    return _with_prompt(session_pb2.ConnectRequest(prefill=message), "prefill", message, request)


def _attempt_fields(tag: Tag, request: PreparedRequest) -> dict[str, Any]:
    """Return the fields that are in both commands, Prefill and Start."""
    return {
        "attempt_id": tag.attempt_id,
        "transfer_id": tag.transfer_id,
        "time_left_ms": tag.time_left_ms,
        "traceparent": tag.traceparent,
        "request_id": tag.request_id,
        "adapter": request.adapter.name if request.adapter is not None else "",
        "adapter_digest": request.adapter.digest if request.adapter is not None else "",
        "answered_tokens": request.answered_tokens,
        "first_choice": request.first_choice,
        "block_hashes": request.block_hashes,
        "kept_session": kept_session_message(request.kept_session),
        "pooling": pooling_message(request.pooling),
        "first_token_in_ms": tag.first_token_in_ms,
        "tbt_slo_ms": _whole_ms(request.objectives.tbt_ms),
        "ttft_slo_ms": _whole_ms(request.objectives.ttft_ms),
    }


def _whole_ms(objective_ms: float) -> int:
    return 0 if math.isinf(objective_ms) else round(objective_ms)


def _fetch(tag: Tag, request: PreparedRequest, placement: Placement) -> session_pb2.Fetch | None:
    if placement.fetch_from is None:
        return None
    return session_pb2.Fetch(
        endpoint=placement.fetch_from,
        transfer_id=tag.fetch_id,
        blocks=placement.fetch_tokens // request.block_tokens,
        loaded_blocks=placement.fetch_loaded_tokens // request.block_tokens,
        load_bytes_per_s=placement.fetch_load_bytes_per_s,
    )


def start(tag: Tag, request: PreparedRequest, prefill_endpoint: str | None) -> Command:
    """Create the command to generate an answer on a decode worker, which prefills if `prefill_endpoint` is None."""
    message = session_pb2.Start(
        **_attempt_fields(tag, request),
        prefill_endpoint=prefill_endpoint or "",
        cache_root=request.cache_root,
        tokens_together=request.tokens_together,
        sampling=sampling_message(request.sampling, computes_prompt=prefill_endpoint is None),
    )
    return _with_prompt(session_pb2.ConnectRequest(start=message), "start", message, request)


def _with_prompt(
    command: session_pb2.ConnectRequest,
    name: str,
    inner: session_pb2.Start | session_pb2.Prefill,
    request: PreparedRequest,
) -> Command:
    """Append the prompt as a second occurrence of the field `name`: parsers merge embedded messages."""
    tokens = field(inner.DESCRIPTOR.fields_by_name["token_ids"].number, request.packed_tokens)
    return Command(command, field(command.DESCRIPTOR.fields_by_name[name].number, tokens))


def kept_session_message(kept: KeptSession | None, name: str = "") -> kept_session_pb2.KeptSession | None:
    """Convert a session's retention. `name`: the client's name of the session; empty in messages to workers."""
    if kept is None:
        return None
    return kept_session_pb2.KeptSession(
        id=kept.id, owner=kept.owner, keep_for_s=kept.keep_for_s, done=kept.done, name=name
    )


def want(blocks: int, slots: int) -> Command:
    return Command(session_pb2.ConnectRequest(want=session_pb2.Want(blocks=blocks, slots=slots)))


def cancel(attempt_id: int, keep_landed: bool = False) -> Command:
    return Command(
        session_pb2.ConnectRequest(cancel=session_pb2.Cancel(attempt_id=attempt_id, keep_landed=keep_landed))
    )


def snapshot_request(tier: bool = False) -> Command:
    """Create the command to send a snapshot of the prefix cache or, with `tier`, of the KV files."""
    return Command(session_pb2.ConnectRequest(snapshot_request=cache_pb2.SnapshotRequest(tier=tier)))


def adopt(router_id: bytes, attempt_id: int, tag: Tag) -> Command:
    """Create the command to continue another router's attempt (`router_id`, `attempt_id`) as the attempt of `tag`."""
    return Command(
        session_pb2.ConnectRequest(
            adopt=session_pb2.Adopt(
                router_id=router_id, attempt_id=attempt_id, as_attempt_id=tag.attempt_id, time_left_ms=tag.time_left_ms
            )
        )
    )


def change_role(role: WorkerRole) -> Command:
    wanted = next(number for number, known in _ROLES.items() if known is role)
    return Command(session_pb2.ConnectRequest(change_role=session_pb2.ChangeRole(role=wanted)))


def prepare_adapter(change_id: int, name: str, path: str) -> Command:
    asked = session_pb2.PrepareAdapter(change_id=change_id, name=name, path=path)
    return Command(session_pb2.ConnectRequest(prepare_adapter=asked))


def drop_adapter(change_id: int) -> Command:
    """Create the command to release the adapter that was loaded for change `change_id`."""
    return Command(
        session_pb2.ConnectRequest(prepare_adapter=session_pb2.PrepareAdapter(change_id=change_id, drop=True))
    )


def adapter_list(version: int, listed: Iterable[ListedAdapter], in_use: Iterable[str]) -> Command:
    """Create the command to apply a list of adapters. `in_use`: digests of unlisted adapters that requests use."""
    adapters = [
        session_pb2.Adapter(name=each.adapter.name, digest=each.adapter.digest, path=each.path, grace_s=each.grace_s)
        for each in listed
    ]
    message = session_pb2.AdapterList(version=version, adapters=adapters, digests_in_use=in_use)
    return Command(session_pb2.ConnectRequest(adapter_list=message))


def bring(hand_over: session_pb2.HandOver, endpoint: str, transfer_id: bytes) -> Command:
    """Create the command to fetch the blocks that the worker at `endpoint` keeps for a session."""
    fetch = session_pb2.Fetch(endpoint=endpoint, transfer_id=transfer_id, blocks=len(hand_over.block_hashes))
    return Command(
        session_pb2.ConnectRequest(
            bring=session_pb2.Bring(fetch=fetch, block_hashes=hand_over.block_hashes, session=hand_over.session)
        )
    )


def attempt_events(message: session_pb2.ConnectResponse, endpoint: str) -> tuple[AttemptEvent, ...]:
    """Return the attempt events of a numbered message; empty for a kind of message that this release does not know."""
    match message.WhichOneof("event"):
        case "prompt_scores":
            scores = message.prompt_scores
            return (PromptScores(scores.attempt_id, scores.offset, _logprobs(scores)),)
        case "first_step":
            return (_first_step(message.first_step),)
        case "step_outputs":
            return _step_outputs(message.step_outputs)
        case "landed":
            return (_copied(KvReceived, message.landed, transferred_bytes=message.landed.bytes),)
        case "failed":
            failed = message.failed
            reason = _FAILURES.get(failed.reason, FailureReason.UNKNOWN)
            return (Failed(failed.attempt_id, endpoint, reason, failed.message),)
        case _:
            return ()


def worker_description(info: session_pb2.WorkerInfo) -> WorkerDescription:
    """Convert a worker's description. Raises: ValueError for a role that this router does not know."""
    if info.role not in _ROLES:
        raise ValueError(f"{info.worker_id} has the unknown role {info.role}")
    return WorkerDescription(
        worker_id=info.worker_id,
        role=_ROLES[info.role],
        pid=info.pid,
        fingerprint=info.fingerprint,
        model=ModelDescription(
            name=info.model.name,
            path=info.model.path,
            max_model_len=info.model.max_model_len,
            vocab_size=info.model.vocab_size,
            dtype=info.model.dtype,
            block_tokens=info.model.block_size,
            makes_answers=not info.model.makes_no_answers,
            groups=groups_of(info.model),
        ),
        total_blocks=info.total_blocks,
        total_slots=info.total_slots,
        adapters=_adapters(info.adapter_state.usable if info.HasField("adapter_state") else info.adapters),
        adapter_list=worker_adapters(info.adapter_state) if info.HasField("adapter_state") else None,
        roles=tuple(_ROLES[role] for role in info.roles if role in _ROLES),
        pool_id=info.pool_id,
        arithmetic=info.arithmetic,
        versions=versions_of(info.versions),
        checkpoint=info.kv.checkpoint,
        kv_layout=info.kv.layout,
    )


def _adapters(adapters: Iterable[session_pb2.Adapter]) -> tuple[Adapter, ...]:
    return tuple(Adapter(each.name, each.digest) for each in adapters)


def usable_adapters(state: session_pb2.AdapterState) -> tuple[Adapter, ...]:
    return _adapters(state.usable)


def worker_adapters(state: session_pb2.AdapterState) -> WorkerAdapters:
    return WorkerAdapters(
        state.version,
        tuple(ListedAdapter(Adapter(each.name, each.digest), each.path, each.grace_s) for each in state.listed),
        _adapters(state.started),
        tuple((each.name, each.why) for each in state.refusals),
        state.own_weights_freed,
    )


def versions_of(message: versions_pb2.Versions) -> Versions:
    return announced(message.release, message.protocol, message.oldest_protocol)


def versions_message(versions: Versions) -> versions_pb2.Versions:
    return versions_pb2.Versions(**asdict(versions))


def _copied(kind: type[Plain], message: Message, **others: Any) -> Plain:
    """Create a `kind` from the message's fields of the same names. `others`: values of all other fields."""
    same = {each.name: getattr(message, each.name) for each in fields(kind) if each.name not in others}
    return kind(**same, **others)


def worker_report(report: report_pb2.Report) -> WorkerReport:
    return _copied(
        WorkerReport,
        report,
        pages=_copied(PoolBlocks, report.pages),
        links=tuple(_copied(KvLink, each) for each in report.links),
        cache=cache_wire.cache_sum(report.cache) if report.HasField("cache") else None,
        alone_tokens_per_s=report.alone_tokens_per_s or None,
        beside_tokens_per_s=report.beside_tokens_per_s or None,
        accepted_tokens=tuple(report.accepted_tokens),
        tier=_copied(TierReport, report.tier) if report.HasField("tier") else None,
        sessions=_copied(SessionReport, report.sessions),
    )


class ReportReader:
    """Reader of one worker's reports. An idle worker repeats its report: only the time of the message changes."""

    def __init__(self) -> None:
        self._message: report_pb2.Report | None = None  # last report, without its time
        self._report: WorkerReport | None = None
        self.now_us = 0
        """Time of the last report, on the worker's clock."""

    def repeated(self, message: report_pb2.Report) -> WorkerReport | None:
        """Return the last report if this one equals it; otherwise None, and `read` must be called after the checks."""
        now_us, message.now_us = message.now_us, 0
        is_repeated = message == self._message and now_us <= MAX_EXACT
        self.now_us = now_us if is_repeated else self.now_us
        message.now_us = now_us
        return self._report if is_repeated else None

    def read(self, message: report_pb2.Report) -> WorkerReport:
        """Convert a report whose bounds were checked."""
        self._report, self.now_us = worker_report(message), message.now_us
        message.now_us = 0
        self._message = message
        return self._report


def sampling_message(sampling: Sampling, computes_prompt: bool) -> sampling_pb2.Sampling:
    rules, beams = sampling.rules, sampling.beams
    return sampling_pb2.Sampling(
        max_tokens=sampling.max_tokens,
        **numbers_of(sampling),
        seed=sampling.seed,
        stop_token_ids=sampling.stop_token_ids,
        n=sampling.n,
        logit_bias=rules.logit_bias,
        allowed_token_ids=rules.allowed_token_ids,
        bad_words=[sampling_pb2.BadWord(token_ids=word) for word in rules.bad_words],
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs if computes_prompt else None,
        beam_width=beams.width if beams is not None else 0,
        length_penalty=beams.length_penalty if beams is not None else 0.0,
        beam_stop=BEAM_STOPS[beams.stop] if beams is not None else sampling_pb2.BEAM_STOP_UNSPECIFIED,
        structured=_structured(sampling.structured),
        most_drafted=sampling.most_drafted,
    )


def _structured(asked: StructuredOutput | None) -> sampling_pb2.StructuredOutput | None:
    if asked is None:
        return None
    return sampling_pb2.StructuredOutput(kind=STRUCTURED_KINDS[asked.kind], text=asked.text)


def _step_outputs(step: session_pb2.StepOutputs) -> tuple[SequenceOutput, ...]:
    if not step.made_us:
        return tuple(_output(output) for output in step.outputs)
    made = Made(step.made_us, step.held_us, held=_causes(step.held), since=_causes(step.since))
    columns = zip(step.attempt_ids, step.choices, step.offsets, step.token_ids, strict=True)
    single = [
        SequenceOutput(attempt_id, choice, offset, (token_id,), None, (), made)
        for attempt_id, choice, offset, token_id in columns
    ]
    if not (step.gaps or step.drafts):
        return (*single, *(_output(output, made) for output in step.outputs))
    each_made = dict.fromkeys(range(len(step.outputs)), made)
    for gap in step.gaps:
        each_made[gap.output] = made._replace(gap=WorkerGap(gap.usual_ms, _causes(gap.causes)))
    for each in step.drafts:
        drafts = Drafts(each.drafted_tokens, each.accepted_tokens, each.saved_ms)
        each_made[each.output] = each_made.get(each.output, made)._replace(drafts=drafts)
    return (*single, *(_output(output, each_made[index]) for index, output in enumerate(step.outputs)))


_CAUSE_NUMBERS = {cause: number for number, cause in _CAUSES.items()}


def cause_message(part: CausePart) -> session_pb2.GapCause:
    number = _CAUSE_NUMBERS.get(part.cause, session_pb2.STALL_CAUSE_UNSPECIFIED)
    return session_pb2.GapCause(cause=number, ms=part.ms, request_id=part.request_id, detail=part.detail)


def _causes(causes: Sequence[session_pb2.GapCause]) -> tuple[CausePart, ...]:
    if not causes:
        return ()
    return tuple(
        CausePart(_CAUSES.get(each.cause, StallCause.UNKNOWN), each.ms, each.request_id, each.detail) for each in causes
    )


def _output(output: session_pb2.SequenceOutput, made: Made | None = None) -> SequenceOutput:
    logprobs = _logprobs(output) if output.logprobs else ()
    end = _ENDS.get(output.end)
    return SequenceOutput(output.attempt_id, output.choice, output.offset, tuple(output.token_ids), end, logprobs, made)


def _logprobs(output: session_pb2.SequenceOutput | session_pb2.PromptScores) -> tuple[TokenLogprob, ...]:
    if not output.logprobs:
        return ()
    top = [Alternative(*pair) for pair in zip(output.top_token_ids, output.top_logprobs, strict=False)]
    width = len(top) // len(output.logprobs)
    return tuple(
        TokenLogprob(logprob, tuple(top[index * width : (index + 1) * width]))
        for index, logprob in enumerate(output.logprobs)
    )


def _first_step(first_step: session_pb2.FirstStep) -> FirstStep:
    return FirstStep(
        attempt_id=first_step.attempt_id,
        outputs=tuple(_output(output) for output in first_step.outputs),
        pooled=tuple(first_step.pooled),
        timings=_copied(PrefillTimings, first_step.timings, chunk_ms=tuple(first_step.timings.chunk_ms)),
    )


def groups_of(model: session_pb2.ModelInfo) -> BlockGroups:
    """Convert a model's block groups. Raises: ValueError for groups that cannot work."""
    if not model.HasField("block_groups"):
        return ONE_GROUP
    groups = model.block_groups
    if not (groups.whole + groups.windowed and model.block_size):
        raise ValueError("block_groups has no groups, or block_size is 0")
    return BlockGroups(groups.whole, groups.windowed, groups.window_tokens, model.block_size)
