"""Trace spans of a request on this worker, as children of the router's span. Pure.

A prefill worker writes `worker.prefill` (from the command until its KV was read) with `worker.prefill.chunk` and
`worker.kv.fetch`. A decode worker writes `worker.decode` (from the command until the last token) with `worker.kv.pull`,
`worker.decode.first_step` and `worker.decode.steps`, or the chunks of a prompt that it computes itself.

Times are converted to the router's clock. The attribute `baton.clock.offset_ms` is the offset that was added;
`baton.clock.error_ms` is its maximum error.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from baton.process.telemetry.clock_offset import ClockOffset
from baton.process.telemetry.spans import AttributeValue, FinishedSpan, SpanKind, Telemetry, WallClock
from baton.process.telemetry.trace_context import TraceContext, parse_traceparent
from baton.worker.times import RequestTimes

SHOWN_CHUNKS = 8  # maximum number of chunk spans per prompt; the last one covers all later chunks


class _Stage(NamedTuple):
    """Stage of a request, in monotonic seconds."""

    name: str
    began_s: float
    ended_s: float
    attributes: dict[str, AttributeValue]


@dataclass(frozen=True, slots=True)
class WorkerClock:
    """Clocks of this process, read at one moment, and the offset of the router's clock."""

    wall: WallClock
    router: ClockOffset | None  # None: unknown; this process's wall clock is used

    def at(self, monotonic_s: float) -> int:
        """Convert a monotonic time to nanoseconds since 1970 on the router's clock."""
        if self.router is None:
            return self.wall.at(monotonic_s)
        return round((monotonic_s + self.router.offset_s) * 1e9)

    @property
    def attributes(self) -> dict[str, AttributeValue]:
        if self.router is None:
            return {}
        now_s = self.wall.monotonic_s
        return {
            "baton.clock.offset_ms": round((self.at(now_s) - self.wall.at(now_s)) / 1e6, 3),
            "baton.clock.error_ms": round(self.router.error_s * 1e3, 3),
        }


def write_spans(telemetry: Telemetry, times: RequestTimes, worker_id: str, role: str, clock: WorkerClock) -> None:
    """Write the spans of a finished request, unless its router sent no sampled trace context."""
    parent = parse_traceparent(times.traceparent)
    if parent is None or not parent.sampled:
        return
    root = parent.child()
    for span in request_spans(times, worker_id, role, clock, parent, root):
        telemetry.span(span)


def request_spans(
    times: RequestTimes, worker_id: str, role: str, clock: WorkerClock, parent: TraceContext, root: TraceContext
) -> Iterator[FinishedSpan]:
    """Yield the spans of a request. `root`: context of the first span, child of `parent`, parent of the others."""
    attributes: dict[str, AttributeValue] = {
        "baton.elastic_worker": worker_id,
        "baton.request_id": times.request_id,
        "baton.prompt_tokens": times.prompt_tokens,
        "baton.cached_tokens": times.cached_tokens,
        "baton.tokens": times.tokens,
        **clock.attributes,
    }
    if times.drafted_tokens:
        attributes |= {
            "baton.drafted_tokens": times.drafted_tokens,
            "baton.accepted_tokens": times.accepted_tokens,
        }
    ended_s = times.ended_s or times.last_token_s or times.arrived_s
    yield FinishedSpan(
        f"worker.{role}",
        clock.at(times.arrived_s),
        clock.at(ended_s),
        parent,
        root,
        SpanKind.SERVER,
        attributes,
        error=times.failure or None,
    )
    for stage in (*_prompt_stages(times, role), *_answer_stages(times)):
        began_ns, ended_ns = clock.at(stage.began_s), clock.at(max(stage.began_s, stage.ended_s))
        yield FinishedSpan(stage.name, began_ns, ended_ns, root, attributes=stage.attributes)


def _prompt_stages(times: RequestTimes, role: str) -> Iterator[_Stage]:
    restore, transfer = times.restore, times.transfer
    if restore is not None:
        yield _Stage(
            "worker.kv.restore",
            restore.began_s,
            restore.ended_s,
            {"baton.tokens": restore.tokens, "baton.transfer.bytes": restore.bytes},
        )
    if transfer is not None:
        yield _Stage(
            "worker.kv.fetch" if role == "prefill" else "worker.kv.pull",
            transfer.began_s,
            transfer.ended_s,
            {
                "baton.transfer.source": transfer.source,
                "baton.transfer.bytes": transfer.bytes,
                "baton.transfer.transport": transfer.transport,
            },
        )
    shown, rest = times.chunks[: SHOWN_CHUNKS - 1], times.chunks[SHOWN_CHUNKS - 1 :]
    for chunk in shown:
        yield _Stage("worker.prefill.chunk", chunk.began_s, chunk.ended_s, {"baton.tokens": chunk.tokens})
    if rest:
        tokens = sum(chunk.tokens for chunk in rest)
        attributes: dict[str, AttributeValue] = {"baton.tokens": tokens, "baton.chunks": len(rest)}
        yield _Stage("worker.prefill.chunk", rest[0].began_s, rest[-1].ended_s, attributes)


def _answer_stages(times: RequestTimes) -> Iterator[_Stage]:
    first_s, last_s = times.first_step_s, times.last_token_s
    if first_s is None:
        return
    if times.transfer is not None and last_s is not None:
        yield _Stage("worker.decode.first_step", times.transfer.ended_s, first_s, {})
    if last_s is not None and last_s > first_s:
        yield _Stage("worker.decode.steps", first_s, last_s, {"baton.tokens": times.tokens})
