"""Explanations of requests: made of the records of those that have ended, and told to whoever asks."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict

from protos import admin_pb2
from router.admin_wire import ROLES
from router.explanation import AttemptNote, Explanation, Explanations, Outcome
from router.placement import WorkerView
from router.timeline import stages
from router.tracing import RequestRecord
from router.weighing import weighed_terms
from router.worker import WorkerRole
from service.errors import NotFound

_NO_TERMS = frozenset({"endpoint", "role", "fingerprint", "adapters"})
_IN_WORDS = frozenset({"prefill", "decode", "local_prefill", "fetch_from", "policy"})


class Explainer:
    """Keeps the newest requests. `worker_id` names the worker at an endpoint, or gives its endpoint back."""

    def __init__(self, worker_id: Callable[[str], str], clock: Callable[[], float] = time.monotonic) -> None:
        self._kept = Explanations()
        self._worker_id = worker_id
        self._clock = clock

    def observe(self, record: RequestRecord) -> None:
        """A request has ended."""
        if record.prepared is None or not record.timeline.notes:
            return  # it was refused before anyone was chosen
        timeline, gaps = record.timeline, record.timeline.gaps.summary()
        measured = stages(timeline, self._clock())
        outcome = Outcome(
            record.error or "OK",
            len(record.prepared.token_ids),
            measured.ttft_ms,
            measured.total_ms,
            gaps.p50_ms if gaps else 0.0,
            gaps.p99_ms if gaps else 0.0,
        )
        request_id = record.prepared.valid.request_id
        self._kept.add(Explanation(request_id, timeline.arrived_s, outcome, tuple(timeline.notes)))

    def explain(self, request_id: str) -> admin_pb2.ExplainResponse:
        """Raises: NotFound for one that has not ended, was not served here, or is too long ago."""
        found = self._kept.find(request_id)
        if found is None:
            raise NotFound("request", request_id)
        outcome = found.outcome
        return admin_pb2.ExplainResponse(
            request_id=request_id,
            age_s=self._clock() - found.arrived_s,
            prompt_tokens=outcome.prompt_tokens,
            status=outcome.status,
            attempts=[self._attempt(note) for note in found.attempts],
            ttft_ms=outcome.ttft_ms,
            total_ms=outcome.total_ms,
            tbt_p50_ms=outcome.tbt_p50_ms,
            tbt_p99_ms=outcome.tbt_p99_ms,
        )

    def _attempt(self, note: AttemptNote) -> admin_pb2.ExplainedAttempt:
        placement, failed = note.placement, note.failed
        weighed = weighed_terms(note.request, note.candidates, placement)
        return admin_pb2.ExplainedAttempt(
            candidates=[self._candidate(note, view, weighed.get(view.endpoint, {})) for view in note.candidates],
            policy=placement.policy,
            reason=self._reason(note),
            queue_ms=(note.placed_s - note.began_s) * 1e3,
            predicted=dict(_numbers(placement._asdict())),
            actual=dict(_actual(note)),
            transport=note.landed.transport if note.landed else "",
            failure=f"{failed.reason.name}: {failed.message}" if failed else "",
            failed_endpoint=failed.endpoint if failed else "",
        )

    def _candidate(
        self, note: AttemptNote, view: WorkerView, weighed: Mapping[str, float]
    ) -> admin_pb2.ExplainedCandidate:
        return admin_pb2.ExplainedCandidate(
            worker_id=self._worker_id(view.endpoint),
            endpoint=view.endpoint,
            role=ROLES[view.role],
            chosen=view.endpoint in note.placement.endpoints,
            excluded=_excluded(note, view),
            terms={
                **{n: value for n, value in _numbers(asdict(view)) if value or n in ("tokens_in_flight", "hit_blocks")},
                **weighed,
            },
        )

    def _reason(self, note: AttemptNote) -> str:
        placement = note.placement
        decode = self._worker_id(placement.decode)
        if placement.local_prefill is not None:
            way = f"{decode} computes the prompt itself: {placement.local_prefill.value.replace('_', ' ')}"
        elif placement.prefill is not None:
            way = f"{self._worker_id(placement.prefill)} computes the prompt, {decode} goes on from there"
        else:
            way = f"{decode} computes the prompt itself"
        if placement.fetch_from is not None:
            way += f"; {placement.fetch_tokens} tokens may be fetched from {self._worker_id(placement.fetch_from)}"
        if note.answered_tokens:
            which = "the answer" if note.choice is None else f"choice {note.choice}"
            way = f"{which} goes on at token {note.answered_tokens}: {way}"
        return way


def _excluded(note: AttemptNote, view: WorkerView) -> str:
    request = note.request
    if not request.suits(view):
        return "it has another model, or not this adapter"
    if view.role is WorkerRole.PREFILL and view.endpoint in request.avoided_prefill:
        return "it failed this request before"
    if view.role is WorkerRole.DECODE and view.used_slots + request.choices > view.limit_slots:
        return "no place in its batch"
    if view.role is WorkerRole.DECODE and view.used_blocks + request.charged_blocks > view.limit_blocks:
        return "no credit for its blocks"
    return ""


def _actual(note: AttemptNote) -> Iterator[tuple[str, float]]:
    if (prefill := note.prefill) is not None:
        yield "cached_tokens", prefill.cached_tokens
        yield "prefill_queue_ms", prefill.queue_ms - prefill.fetch_ms
        yield "prefill_ms", sum(prefill.chunk_ms)
        if prefill.fetch_ms:
            yield "fetched_tokens", prefill.fetched_tokens
            yield "fetch_ms", prefill.fetch_ms
    if (landed := note.landed) is not None:
        yield "decode_cached_tokens", landed.cached_tokens
        yield "transfer_bytes", landed.transferred_bytes
        yield "copy_ms", landed.copy_ms
        yield "transfer_exposed_ms", landed.exposed_ms
        yield "decode_admission_ms", landed.admission_ms


def _numbers(values: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    """The numeric ones, by name."""
    for name, value in values.items():
        if name not in _NO_TERMS | _IN_WORDS and isinstance(value, int | float):
            yield name, float(value)
