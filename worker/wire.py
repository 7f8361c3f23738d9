"""Conversion between engine values and session messages."""

import asyncio
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from baton.engine.kv_cache.sessions import SessionTurn
from baton.engine.request import Drawn, EndReason, FirstToken, Objectives, Request, TokenLogprob
from baton.engine.runner.loop import EngineLoop
from baton.engine.sampling.constraint import Constraint, Grammars
from baton.engine.sampling.params import SamplingParams, candidates_per_beam
from baton.engine.sampling.thoughts import thought_constraint
from baton.process.links.hub import RouterLink
from baton.protos import kept_session_pb2, report_pb2, sampling_pb2, session_pb2
from baton.text.block_groups import ONE_GROUP, BlockGroups
from baton.text.causes import CausePart, StallCause
from baton.text.pooling import Pooling, PoolingKind
from baton.text.sampling import BeamParams, BeamStop, received_numbers
from baton.text.structured.library import LibraryMissing
from baton.text.structured.output import StructuredKind, StructuredOutput
from baton.worker.at_rest.sums import RestCounters
from baton.worker.transfer.reader import TransferReader


class LoggedToken(Protocol):
    """Token with its log-probability and the most likely alternatives."""

    @property
    def logprob(self) -> float: ...

    @property
    def top(self) -> Sequence[TokenLogprob]: ...


END_REASONS = {
    None: session_pb2.END_REASON_UNSPECIFIED,
    EndReason.STOP: session_pb2.END_REASON_STOP,
    EndReason.LENGTH: session_pb2.END_REASON_LENGTH,
}


def groups_to_wire(groups: BlockGroups) -> session_pb2.BlockGroups | None:
    """Convert block groups to their message; None for a single group."""
    if groups == ONE_GROUP:
        return None
    return session_pb2.BlockGroups(whole=groups.whole, windowed=groups.windowed, window_tokens=groups.window_tokens)


def groups_of(model: session_pb2.ModelInfo) -> BlockGroups:
    if not model.HasField("block_groups"):
        return ONE_GROUP
    groups = model.block_groups
    return BlockGroups(groups.whole, groups.windowed, groups.window_tokens, model.block_size)


BEAM_STOPS = {
    sampling_pb2.BEAM_STOP_UNSPECIFIED: BeamStop.UNPROMISING,
    sampling_pb2.BEAM_STOP_FULL: BeamStop.FULL,
    sampling_pb2.BEAM_STOP_NEVER: BeamStop.NEVER,
}


STALL_CAUSES = {
    StallCause.PROMPTS: session_pb2.STALL_CAUSE_PROMPT_TOKENS,
    StallCause.BATCH: session_pb2.STALL_CAUSE_LARGER_BATCH,
    StallCause.CONTEXTS: session_pb2.STALL_CAUSE_LONGER_CONTEXTS,
    StallCause.DRAFTS: session_pb2.STALL_CAUSE_DRAFTED_TOKENS,
    StallCause.COPIES: session_pb2.STALL_CAUSE_BLOCK_COPIES,
    StallCause.PREEMPTION: session_pb2.STALL_CAUSE_PREEMPTION,
    StallCause.MASK: session_pb2.STALL_CAUSE_LATE_MASK,
    StallCause.COLLECTION: session_pb2.STALL_CAUSE_GARBAGE_COLLECTION,
    StallCause.LOCK: session_pb2.STALL_CAUSE_INTERPRETER_LOCK,
    StallCause.CPU_WAIT: session_pb2.STALL_CAUSE_CPU_WAIT,
    StallCause.STOPPED: session_pb2.STALL_CAUSE_STOPPED,
    StallCause.SLOWER: session_pb2.STALL_CAUSE_SLOWER_COMPUTATION,
    StallCause.IDLE: session_pb2.STALL_CAUSE_ENGINE_IDLE,
    StallCause.LENT: session_pb2.STALL_CAUSE_LENT_CORES,
    StallCause.WORKER_LOOP: session_pb2.STALL_CAUSE_WORKER_EVENT_LOOP,
}
"""Messages' names of the causes of late tokens."""


def sampling_params(sampling: sampling_pb2.Sampling, constraint: Constraint | None = None) -> SamplingParams:
    """Convert sampling parameters. `constraint`: compiled from the field `structured`. Raises: ValueError, naming the
    field.
    """
    stop_token_ids, width = frozenset(sampling.stop_token_ids), sampling.beam_width
    stop = BEAM_STOPS.get(sampling.beam_stop)
    if stop is None:
        raise ValueError(f"beam_stop: this worker does not know number {sampling.beam_stop}")
    beam = BeamParams(width, sampling.length_penalty, stop) if width else None
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        **received_numbers(sampling),
        seed=sampling.seed,
        stop_token_ids=stop_token_ids,
        n=sampling.n,
        logit_bias=dict(sampling.logit_bias),
        allowed_token_ids=frozenset(sampling.allowed_token_ids) or None,
        bad_words=tuple(tuple(word.token_ids) for word in sampling.bad_words),
        logprobs=sampling.logprobs if beam is None else candidates_per_beam(width, stop_token_ids),
        prompt_logprobs=sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
        beam=beam,
        constraint=constraint,
        most_drafted=sampling.most_drafted if sampling.HasField("most_drafted") else None,
    )


POOLINGS = {
    session_pb2.POOLING_KIND_LAST: PoolingKind.LAST,
    session_pb2.POOLING_KIND_MEAN: PoolingKind.MEAN,
    session_pb2.POOLING_KIND_CLS: PoolingKind.FIRST,
}


def pooling_of(command: session_pb2.Prefill | session_pb2.Start) -> Pooling | None:
    """Return the pooling of an embedding request, None for other requests. Raises: ValueError, naming the field."""
    if not command.HasField("pooling"):
        return None
    kind = POOLINGS.get(command.pooling.kind)
    if kind is None:
        raise ValueError(f"pooling.kind: this worker does not know number {command.pooling.kind}")
    second_from = command.pooling.second_from if command.pooling.HasField("second_from") else None
    return Pooling(kind, tuple(command.pooling.head_token_ids), second_from)


def request_of(
    request_id: int,
    command: session_pb2.Prefill | session_pb2.Start,
    params: SamplingParams,
    adapter: int,
    objectives: Objectives,
) -> Request:
    """Build the engine request of a command. A continued answer gets no log-probabilities of its prompt.

    Raises: ValueError, naming the field.
    """
    pooling = pooling_of(command)
    if command.answered_tokens and params.prompt_logprobs is not None:
        params = replace(params, prompt_logprobs=None)
    return Request(
        request_id,
        tuple(command.token_ids),
        params,
        tuple(command.block_hashes),
        adapter,
        command.answered_tokens,
        command.first_choice,
        prefill_only=isinstance(command, session_pb2.Prefill) or pooling is not None,
        turn=session_turn(command.kept_session) if command.HasField("kept_session") else None,
        pooling=pooling,
        objectives=objectives,
    )


def objectives_of(
    command: session_pb2.Prefill | session_pb2.Start, arrived_s: float, tbt_s: float = math.inf
) -> Objectives:
    """Return the latency objectives of a command that arrived at `arrived_s`, in monotonic seconds. `tbt_s`: the
    worker's TBT objective, for a command without one. Its deadline counts only with a TTFT objective.
    """
    own_tbt_s = command.tbt_slo_ms / 1e3 if command.tbt_slo_ms else tbt_s
    if not (command.HasField("first_token_in_ms") and command.ttft_slo_ms):
        return Objectives(tbt_s=own_tbt_s)
    wanted_s, deadline_s = arrived_s + command.first_token_in_ms / 1e3, arrived_s + command.time_left_ms / 1e3
    return Objectives(wanted_s, own_tbt_s, command.ttft_slo_ms / 1e3, deadline_s)


def session_turn(kept: kept_session_pb2.KeptSession) -> SessionTurn:
    """Convert the user session of a command that has just arrived."""
    keep_for_s = kept.keep_for_s if kept.HasField("keep_for_s") else None
    return SessionTurn(kept.id, kept.owner, time.monotonic(), keep_for_s, kept.done)


def failure_of(cause: str) -> "tuple[session_pb2.FailureReason, str]":
    """Return failure reason and message of a request that failed in the engine. `cause`: see NonFinite; empty: the
    logits are not finite.
    """
    if cause:
        return session_pb2.FAILURE_REASON_INVALID, cause
    return session_pb2.FAILURE_REASON_NONFINITE, "the logits of this request are not finite"


def first_output(
    attempt_id: int, first: FirstToken, with_logprobs: bool, answered_tokens: int = 0
) -> session_pb2.SequenceOutput:
    """Build the message with the first token of one choice. `answered_tokens`: number of tokens of earlier attempts,
    which precede it.
    """
    output = session_pb2.SequenceOutput(
        attempt_id=attempt_id,
        choice=first.choice,
        offset=answered_tokens,
        token_ids=[first.token_id],
        end=END_REASONS[first.end],
    )
    if with_logprobs:
        add_logprobs(output, first)
    return output


def add_logprobs(output: session_pb2.SequenceOutput, token: LoggedToken) -> None:
    """Append the log-probabilities of the next token of `output`."""
    output.logprobs.append(token.logprob)
    output.top_token_ids.extend(each.token_id for each in token.top)
    output.top_logprobs.extend(each.logprob for each in token.top)


def gap_causes(causes: Iterable[CausePart]) -> list[session_pb2.GapCause]:
    return [
        session_pb2.GapCause(cause=STALL_CAUSES[part.cause], ms=part.ms, request_id=part.request_id, detail=part.detail)
        for part in causes
    ]


def prompt_scores(attempt_id: int, offset: int, scores: Sequence[Drawn]) -> session_pb2.PromptScores:
    """Build the message with the log-probabilities of prompt tokens. `scores`: tokens from position `offset` on."""
    return session_pb2.PromptScores(
        attempt_id=attempt_id,
        offset=offset,
        logprobs=[token.logprob for token in scores],
        top_token_ids=[each.token_id for token in scores for each in token.top],
        top_logprobs=[each.logprob for token in scores for each in token.top],
    )


@dataclass(frozen=True, slots=True)
class Limit:
    """Maximum blocks and batch slots that a router may use on a worker."""

    blocks: int
    slots: int


def send_report(link: RouterLink[session_pb2.ConnectResponse], epoch: int, report: report_pb2.Report) -> None:
    """Send a report to a router, with the present time; see `RouterLink.send_latest`."""
    content = report.SerializeToString()
    report.now_us = round(time.monotonic() * 1e6)
    link.send_latest(session_pb2.ConnectResponse(epoch=epoch, report=report), content)


def worker_report(
    loop: EngineLoop,
    reader: TransferReader | None,
    limit: Limit,
    waiting_requests: int,
    draining: bool,
    cache: report_pb2.CacheSum,
    at_rest: RestCounters,
    tier: report_pb2.TierReport | None = None,
    taken_over_blocks: int = 0,
) -> report_pb2.Report:
    """Build a report for one router, without its time. `limit`: blocks and slots that it may use. `waiting_requests`:
    requests not yet in the engine.
    """
    load = loop.load
    return report_pb2.Report(
        limit_blocks=limit.blocks,
        limit_slots=limit.slots,
        pages=report_pb2.PageCounts(
            **asdict(load.pages),
            held_by_sequences=load.held_by_sequences,
            held_by_transfers=load.held_by_transfers,
        ),
        waiting_requests=waiting_requests + load.waiting_sequences,
        running_sequences=load.running_sequences,
        pending_tokens=load.pending_tokens,
        draining=draining,
        steps=loop.steps,
        cache_query_tokens=load.cache_query_tokens,
        cache_hit_tokens=load.cache_hit_tokens,
        preemptions=load.preemptions,
        unfilled_slots=load.unfilled_slots,
        links=[
            report_pb2.LinkReport(
                endpoint=link.endpoint, transport=link.transport, gb_per_s=link.gb_per_s, fallback=link.fallback
            )
            for link in (() if reader is None else reader.links)
        ],
        cache=cache,
        alone_tokens_per_s=load.rates.alone_tokens_per_s or 0.0,
        beside_tokens_per_s=load.rates.beside_tokens_per_s or 0.0,
        drafts=load.speculated.drafts,
        drafted_tokens=load.speculated.drafted_tokens,
        accepted_tokens=load.speculated.accepted_by_position,
        drafts_gained_s=load.speculated.gained_s,
        drafts_lost_s=load.speculated.lost_s,
        tier=tier,
        sessions=report_pb2.SessionReport(**asdict(load.sessions), taken_over_blocks=taken_over_blocks),
        **asdict(at_rest),
        **({} if reader is None else asdict(reader.integrity)),
    )


KINDS = {
    sampling_pb2.STRUCTURED_KIND_JSON_SCHEMA: StructuredKind.JSON_SCHEMA,
    sampling_pb2.STRUCTURED_KIND_JSON_OBJECT: StructuredKind.JSON_OBJECT,
    sampling_pb2.STRUCTURED_KIND_REGEX: StructuredKind.REGEX,
    sampling_pb2.STRUCTURED_KIND_GRAMMAR: StructuredKind.GRAMMAR,
    sampling_pb2.STRUCTURED_KIND_CHOICE: StructuredKind.CHOICE,
    sampling_pb2.STRUCTURED_KIND_THOUGHTS: StructuredKind.THOUGHTS,
}


async def constraint_of(grammars: Grammars | None, sampling: sampling_pb2.Sampling) -> Constraint | None:
    """Compile the constraint of structured output; None for free text. Raises: ValueError, naming the field."""
    if not sampling.HasField("structured"):
        return None
    kind = KINDS.get(sampling.structured.kind)
    if kind is None or grammars is None:
        raise ValueError("structured: this worker does not support this kind of structured output")
    asked = StructuredOutput(kind, sampling.structured.text)
    try:
        if kind is StructuredKind.THOUGHTS:
            return await asyncio.to_thread(thought_constraint, asked, tuple(sampling.stop_token_ids), grammars)
        return await asyncio.to_thread(grammars.constraint, asked, tuple(sampling.stop_token_ids))
    except (ValueError, LibraryMissing) as error:
        raise ValueError(f"{kind.value}: {error}") from error
