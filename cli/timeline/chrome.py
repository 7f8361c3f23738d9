"""Timelines as Chrome trace events (JSON), which Perfetto and chrome://tracing open. Pure.

A worker has lanes for steps, transfers and requests, and counters of used blocks, waiting sequences and answers per
step. The router has lanes for requests with stages and stalls; a client's lane has its waits. Flows lead from each
request to its workers, and from there to the steps that computed its prompt. Format: Chromium's "Trace Event Format".
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from baton.client.timelines import ProcessTimeline, RoutedRequest, TimelineStep, WorkerRequest

Event = dict[str, Any]
STEPS, TRANSFERS, FIRST_REQUESTS = 1, 2, 10
CLIENTS_PID = 1


class Lanes:
    """Lanes for requests; overlapping requests get different lanes."""

    def __init__(self, first: int = FIRST_REQUESTS) -> None:
        self._first = first
        self._free_at_us: list[int] = []

    def assign(self, began_us: int, ended_us: int) -> int:
        """Return the first lane that is free at `began_us`. Calls must be in ascending order of `began_us`."""
        for lane, free_us in enumerate(self._free_at_us):
            if free_us <= began_us:
                self._free_at_us[lane] = ended_us
                return self._first + lane
        self._free_at_us.append(ended_us)
        return self._first + len(self._free_at_us) - 1

    @property
    def numbers(self) -> range:
        return range(self._first, self._first + len(self._free_at_us))


class Flows:
    """Numbered arrows from a request on its router to its lanes on workers."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._sources: dict[str, tuple[int, int, int]] = {}  # process, lane and start (µs) by request id

    def begin(self, request_id: str, pid: int, lane: int, began_us: int) -> None:
        if request_id:
            self._sources[request_id] = pid, lane, began_us

    def lead_to(self, request_id: str, pid: int, lane: int, at_us: int, name: str) -> Iterator[Event]:
        """Yield an arrow from the request on its router to this lane; nothing if no router has the request."""
        source = self._sources.get(request_id)
        if source is not None:
            yield from self.arrow(source, (pid, lane, at_us), name)

    def arrow(self, source: tuple[int, int, int], target: tuple[int, int, int], name: str) -> Iterator[Event]:
        """Yield the two events of an arrow. `source`, `target`: process, lane, and a time within its slice."""
        number = next(self._numbers)
        common = {"cat": "request", "name": name, "id": number}
        (pid, lane, at_us), (to_pid, to_lane, to_us) = source, target
        yield {**common, "ph": "s", "pid": pid, "tid": lane, "ts": at_us}
        yield {**common, "ph": "f", "bp": "e", "pid": to_pid, "tid": to_lane, "ts": max(to_us, at_us)}


def chrome_trace(timelines: Sequence[ProcessTimeline]) -> dict[str, Any]:
    """Return the JSON of a trace file, in which times count from the earliest event."""
    events = list(trace_events(timelines))
    begin_us = min((event["ts"] for event in events if "ts" in event), default=0)
    for event in events:
        if "ts" in event:
            event["ts"] -= begin_us
    failures = {each.name: each.failure for each in timelines if each.failure}
    about = {"began_us_since_1970": begin_us, "missing": failures}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def trace_events(timelines: Sequence[ProcessTimeline]) -> Iterator[Event]:
    """Yield the events of all processes."""
    flows = Flows()
    for pid, timeline in enumerate(timelines, CLIENTS_PID + 1):
        note = f", clock within {timeline.error_us / 1e3:.2f} ms" if timeline.error_us else ""
        yield named("process_name", pid, f"{timeline.name} ({timeline.role}{note})")
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
        if timeline.role == "router":
            yield from router_events(timeline.requests, pid, flows)
        else:
            yield from worker_events(timeline, pid, flows)


def router_events(requests: Iterable[RoutedRequest], pid: int, flows: Flows) -> Iterator[Event]:
    lanes = Lanes()
    yield named("process_name", CLIENTS_PID, "clients")
    for request in sorted(requests, key=lambda each: each.began_us):
        lane = lanes.assign(request.began_us, request.ended_us)
        facts = {"request": request.request_id, "trace": request.trace_id, "status": request.status or "OK"}
        yield from client_events(request, lane)
        yield slice_of(
            pid, lane, request.request_id or request.name, request.began_us, request.ended_us, facts, "request"
        )
        flows.begin(request.request_id, pid, lane, request.began_us)
        for stage in request.stages:
            ended_us = min(stage.ended_us, request.ended_us)
            began_us = min(max(stage.began_us, request.began_us), ended_us)
            yield slice_of(pid, lane, stage.name, began_us, ended_us, {"request": request.request_id}, "stage")
        for stall in request.stalls:
            causes = {cause: f"{ms:.1f} ms" for cause, ms in stall.causes_ms.items()}
            yield {
                "ph": "i",
                "s": "t",
                "cat": "stall",
                "name": f"stall of {stall.gap_ms:.0f} ms",
                "pid": pid,
                "tid": lane,
                "ts": stall.at_us,
                "args": {"request": request.request_id, **causes},
            }
    for lane in lanes.numbers:
        yield named("thread_name", pid, f"requests {lane - FIRST_REQUESTS + 1}", lane)
        yield named("thread_name", CLIENTS_PID, f"client {lane - FIRST_REQUESTS + 1}", lane)


def client_events(request: RoutedRequest, lane: int) -> Iterator[Event]:
    """Yield slices of a client: its wait for the first token, and its reading of the remaining answer."""
    came_us = max((stage.ended_us for stage in request.stages if stage.name == "return"), default=request.ended_us)
    facts = {"request": request.request_id}
    yield slice_of(CLIENTS_PID, lane, "waits for the first token", request.began_us, came_us, facts, "client")
    if came_us < request.ended_us:
        yield slice_of(CLIENTS_PID, lane, "reads the answer", came_us, request.ended_us, facts, "client")


def worker_events(timeline: ProcessTimeline, pid: int, flows: Flows) -> Iterator[Event]:
    names = {request.number: request.request_id for request in timeline.worker_requests}
    yield named("thread_name", pid, "steps", STEPS)
    yield named("thread_name", pid, "transfers", TRANSFERS)
    for step in timeline.steps:
        yield from step_events(step, pid, names, timeline.total_blocks)
    newest_us = max((step.ended_us for step in timeline.steps), default=0)
    lanes, places = Lanes(), dict[int, tuple[int, int, int]]()
    for request in sorted(timeline.worker_requests, key=lambda each: each.arrived_us):
        ended_us = request.ended_us or max(newest_us, request.last_token_us or 0, request.arrived_us)
        lane = lanes.assign(request.arrived_us, ended_us)
        places[request.number] = pid, lane, request.arrived_us
        yield from request_events(request, pid, lane, ended_us)
        yield from flows.lead_to(request.request_id, pid, lane, request.arrived_us, timeline.role)
    for lane in lanes.numbers:
        yield named("thread_name", pid, f"requests {lane - FIRST_REQUESTS + 1}", lane)
    for step in timeline.steps:
        for number in step.prompts:
            if number in places:
                yield from flows.arrow(places[number], (pid, STEPS, step.began_us), "chunk")


def step_events(step: TimelineStep, pid: int, names: Mapping[int, str], total_blocks: int) -> Iterator[Event]:
    prompt_tokens = sum(step.prompts.values())
    parts = [f"{step.answers} answers"] if step.answers else []
    parts += [f"{step.drafted_tokens} drafted tokens"] if step.drafted_tokens else []
    parts += [f"{prompt_tokens} prompt tokens"] if prompt_tokens else []
    parts += [f"{step.moved_blocks} blocks moved"] if step.moved_blocks else []
    facts = {
        "step": step.number,
        "answers": step.answers,
        "context_tokens": step.context_tokens,
        "drafted_tokens": step.drafted_tokens,
        "prompt_tokens": prompt_tokens,
        "prompts": {names.get(number, str(number)): tokens for number, tokens in step.prompts.items()},
        "requests": sorted({names.get(number, str(number)) for number in step.answer_requests}),
        "moved_blocks": step.moved_blocks,
        "late_masks": step.late,
        "preempted": step.preempted,
        **{f"{name}_ms": round(ms, 3) for name, ms in step.spent_ms.items()},
    }
    yield slice_of(pid, STEPS, ", ".join(parts) or "blocks moved", step.began_us, step.ended_us, facts, "step")
    blocks = {"held": step.held_blocks, "other": max(0, total_blocks - step.held_blocks)}
    yield counter(pid, "KV blocks", step.ended_us, blocks)
    yield counter(pid, "waiting sequences", step.ended_us, {"waiting": step.waiting})
    yield counter(pid, "answers in a step", step.ended_us, {"answers": step.answers})


def request_events(request: WorkerRequest, pid: int, lane: int, ended_us: int) -> Iterator[Event]:
    facts = {
        "request": request.request_id,
        "prompt_tokens": request.prompt_tokens,
        "cached_tokens": request.cached_tokens,
        "tokens": request.tokens,
        "drafted_tokens": request.drafted_tokens,
        "accepted_tokens": request.accepted_tokens,
        **({"failure": request.failure} if request.failure else {}),
    }
    name = request.request_id or f"request {request.number}"
    yield slice_of(pid, lane, name, request.arrived_us, ended_us, facts, "request")
    transfer = request.transfer
    if transfer is not None:
        about = {
            "request": request.request_id,
            "source": transfer.source,
            "bytes": transfer.bytes,
            "transport": transfer.transport,
        }
        title = f"{transfer.bytes / 2**20:.2f} MiB from {transfer.source}"
        yield slice_of(pid, TRANSFERS, title, transfer.began_us, transfer.ended_us, about, "transfer")
    if request.first_token_us is not None and request.last_token_us is not None:
        last_us = min(request.last_token_us, ended_us)
        if request.first_token_us < last_us:
            yield slice_of(pid, lane, "decode", request.first_token_us, last_us, {"tokens": request.tokens}, "stage")


def slice_of(
    pid: int, lane: int, name: str, began_us: int, ended_us: int, facts: Mapping[str, Any], category: str
) -> Event:
    """Return a slice of a lane, at least 1 µs long to be visible."""
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": pid,
        "tid": lane,
        "ts": began_us,
        "dur": max(1, ended_us - began_us),
        "args": dict(facts),
    }


def counter(pid: int, name: str, at_us: int, values: Mapping[str, int]) -> Event:
    return {"ph": "C", "name": name, "pid": pid, "ts": at_us, "args": dict(values)}


def named(kind: str, pid: int, name: str, lane: int = 0) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": lane, "args": {"name": name}}
