"""Conversion of protobuf responses to the client's types. requests.py converts the other way."""

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from baton.client.cluster import Role
from baton.client.convert import ROLES, value_from
from baton.client.errors import ProtocolError
from baton.client.timelines import ProcessTimeline, TimelineStep, WorkerRequest
from baton.client.types import (
    Alternative,
    CallBegins,
    CallPart,
    Delta,
    Embeddings,
    Event,
    Finished,
    FinishReason,
    PromptPart,
    Started,
    ThoughtPart,
    TokenLogprob,
)
from baton.protos import admin_pb2, baton_pb2, session_pb2

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Response = baton_pb2.GenerateResponse | baton_pb2.ChatResponse | baton_pb2.ResumeResponse
FINISH_REASONS = {
    baton_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    baton_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    baton_pb2.FINISH_REASON_TOOL_CALLS: FinishReason.TOOL_CALLS,
}
Timed = TypeVar("Timed", bound="DataclassInstance")


def event_from(response: Response) -> Event:
    """Return the event of a streamed response.

    Raises: ProtocolError for an unknown event or finish reason, and for log-probabilities that do not match their
    tokens.
    """
    match response.WhichOneof("event"):
        case "started":
            return value_from(Started, response.started)
        case "prompt":
            return _prompt_part_from(response.prompt)
        case "delta":
            return _delta_from(response.delta)
        case "finished":
            return _finished_from(response.finished)
    if not isinstance(response, baton_pb2.GenerateResponse):
        match response.WhichOneof("event"):
            case "thought":
                return value_from(ThoughtPart, response.thought)
            case "call_begins":
                return value_from(CallBegins, response.call_begins)
            case "call":
                return value_from(CallPart, response.call)
    raise ProtocolError("unknown event; the server may be newer: update this client")


def _delta_from(delta: baton_pb2.Delta) -> Delta:
    return Delta(delta.index, delta.offset, tuple(delta.token_ids), delta.text, _logprobs_from(delta))


def _prompt_part_from(part: baton_pb2.PromptPart) -> PromptPart:
    return PromptPart(part.offset, tuple(part.token_ids), part.text, _logprobs_from(part))


def _logprobs_from(message: baton_pb2.Delta | baton_pb2.PromptPart) -> tuple[TokenLogprob, ...] | None:
    if not message.HasField("logprobs"):
        return None
    scores, tokens = message.logprobs, len(message.token_ids)
    width = len(scores.top_token_ids) // tokens if tokens else 0
    if len(scores.chosen) != tokens or not len(scores.top_token_ids) == len(scores.top_logprobs) == width * tokens:
        raise ProtocolError("the server sent log-probabilities that do not match their tokens")
    top = [Alternative(*pair) for pair in zip(scores.top_token_ids, scores.top_logprobs, strict=True)]
    return tuple(
        TokenLogprob(token_id, logprob, tuple(top[index * width : (index + 1) * width]))
        for index, (token_id, logprob) in enumerate(zip(message.token_ids, scores.chosen, strict=True))
    )


def _finished_from(finished: baton_pb2.Finished) -> Finished:
    reason = FINISH_REASONS.get(finished.reason)
    if reason is None:
        raise ProtocolError(f"unknown finish reason {finished.reason}; the server may be newer: update this client")
    matched = finished.WhichOneof("matched_stop")
    stop = getattr(finished, matched) if matched else None
    return value_from(Finished, finished, reason=reason, matched_stop=stop)


def embeddings_from(response: baton_pb2.EmbedResponse) -> Embeddings:
    return value_from(Embeddings, response, vectors=tuple(tuple(each.values) for each in response.embeddings))


def timeline_from(message: admin_pb2.ProcessTimeline) -> ProcessTimeline:
    """Return the timeline of a process, with times converted from its clock to the router's."""
    steps = [value_from(TimelineStep, step) for step in message.timeline.steps]
    requests = [value_from(WorkerRequest, request) for request in message.timeline.requests]
    return value_from(
        ProcessTimeline,
        message,
        role=ROLES.get(message.role, "router"),
        total_blocks=message.timeline.total_blocks,
        scheduler=dict(message.timeline.scheduler),
        steps=tuple(_moved(step, message.offset_us) for step in steps),
        worker_requests=tuple(
            replace(
                _moved(request, message.offset_us),
                transfer=None if request.transfer is None else _moved(request.transfer, message.offset_us),
            )
            for request in requests
        ),
    )


def _moved(value: Timed, offset_us: int) -> Timed:
    """Return the value with `offset_us` added to each of its times."""
    times = {each.name: getattr(value, each.name) for each in fields(value) if each.name.endswith("_us")}
    changed: dict[str, Any] = {name: time_us + offset_us for name, time_us in times.items() if time_us is not None}
    return replace(value, **changed)


def role_number(role: Role) -> session_pb2.Role:
    numbers = {"prefill": session_pb2.ROLE_PREFILL, "decode": session_pb2.ROLE_DECODE}
    return numbers.get(role, session_pb2.ROLE_UNSPECIFIED)
