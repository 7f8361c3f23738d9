"""Servicer of timelines: the newest steps and requests of this worker, from bounded memory."""

import math
import time
from collections.abc import Iterator

import grpc

from baton.engine.runner.loop import EngineLoop
from baton.engine.runner.step_records import StepRecord
from baton.protos import timeline_pb2, timeline_pb2_grpc
from baton.worker.times import RequestLog, RequestTimes


class TimelineServicer(timeline_pb2_grpc.TimelineServiceServicer):
    """Servicer of TimelineService for one role of a worker."""

    def __init__(self, requests: RequestLog, loop: EngineLoop) -> None:
        self._requests = requests
        self._loop = loop

    async def GetTimeline(
        self,
        request: timeline_pb2.GetTimelineRequest,
        context: "grpc.aio.ServicerContext[timeline_pb2.GetTimelineRequest, timeline_pb2.GetTimelineResponse]",
    ) -> timeline_pb2.GetTimelineResponse:
        response = timeline_pb2.GetTimelineResponse()
        if request.last_ms:
            since_s = time.monotonic() - request.last_ms / 1e3
            response.steps.extend(map(step_message, self._steps(since_s)))
            response.requests.extend(map(request_message, self._requests.since(since_s)))
            response.total_blocks = self._loop.load.pages.total
            response.scheduler.update(self._loop.settings)
        response.now_us = _us(time.monotonic())
        return response

    def _steps(self, since_s: float) -> Iterator[StepRecord]:
        return (step for step in self._loop.history if step.ended >= since_s)


def step_message(step: StepRecord) -> timeline_pb2.TimelineStep:
    return timeline_pb2.TimelineStep(
        number=step.number,
        began_us=_us(step.started),
        ended_us=_us(step.ended),
        answers=len(step.answers),
        context_tokens=step.context_tokens,
        prompts=[timeline_pb2.TimelinePrompt(request_number=each, tokens=tokens) for each, tokens in step.prompts],
        moved_blocks=step.moved_blocks,
        held_blocks=step.held_blocks,
        waiting=step.waiting,
        late=len(step.late),
        preempted=len(step.preempted),
        request_numbers=step.answers,
        drafted_tokens=step.drafted_tokens,
        spent_ms={name: seconds * 1e3 for name, seconds in _named(step).items() if seconds > 1e-6},
        calls=[timeline_pb2.SchedulerCall(kind=call.kind.value, request_number=call.request_id) for call in step.calls],
        observed_s=step.observed_s,
        period_s=step.period_s,
        digest=step.digest,
    )


def request_message(times: RequestTimes) -> timeline_pb2.TimelineRequest:
    transfer, wanted = times.transfer, times.objectives
    return timeline_pb2.TimelineRequest(
        number=times.number,
        request_id=times.request_id,
        arrived_us=_us(times.arrived_s),
        prompt_tokens=times.prompt_tokens,
        cached_tokens=times.cached_tokens,
        chunks=[
            timeline_pb2.TimelineChunk(began_us=_us(chunk.began_s), ended_us=_us(chunk.ended_s), tokens=chunk.tokens)
            for chunk in times.chunks
        ],
        transfer=None
        if transfer is None
        else timeline_pb2.TimelineTransfer(
            began_us=_us(transfer.began_s),
            ended_us=_us(transfer.ended_s),
            source=transfer.source,
            bytes=transfer.bytes,
            transport=transfer.transport,
        ),
        first_token_us=_us(times.first_step_s),
        last_token_us=_us(times.last_token_s),
        tokens=times.tokens,
        drafted_tokens=times.drafted_tokens,
        accepted_tokens=times.accepted_tokens,
        ended_us=_us(times.ended_s),
        failure=times.failure,
        wanted_us=_us(_finite(wanted.first_token_at_s)),
        ttft_slo_ms=1e3 * (_finite(wanted.ttft_s) or 0.0),
        tbt_slo_ms=1e3 * (_finite(wanted.tbt_s) or 0.0),
        deadline_us=_us(_finite(wanted.deadline_s)),
    )


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


def _named(step: StepRecord) -> dict[str, float]:
    """Return the parts of a step's time by name, such as `queued`, in seconds."""
    return {name.removesuffix("_s"): seconds for name, seconds in step.spent._asdict().items()}


def _us(seconds: float | None) -> int:
    """Convert seconds to microseconds; 0 for None."""
    return 0 if seconds is None else round(seconds * 1e6)
