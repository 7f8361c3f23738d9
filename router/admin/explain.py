"""Explains requests that have ended: their decision records are put into words when they are asked for.

`explain` says why a request was placed as it was, `why` also where its time went and what became of its cached blocks.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields

from baton.process.errors import NotFound
from baton.protos import admin_pb2
from baton.router.admin.why import colocated_of, why_response
from baton.router.admin.wire import ROLES
from baton.router.cache.autopsy import NOWHERE, SALT_BLOCKS, Held
from baton.router.cache.replica import Caches
from baton.router.placement.colocated import LocalPrefills
from baton.router.placement.decide import Decision, LocalPrefill, excluded
from baton.router.trace.recent import DecisionRecord, DecisionRecords, Outcome, Waits
from baton.router.trace.record import AttemptNote, RequestRecord, stages
from baton.router.types.placement import WorkerView
from baton.router.types.request import PreparedRequest

_NO_TERMS = frozenset({"endpoint", "role", "fingerprint", "adapters"})
_IN_WORDS = frozenset({"prefill", "decode", "local_prefill", "fetch_from", "policy"})


class Explainer:
    """Keeps the newest requests. `worker_id` names the worker at an endpoint, or gives its endpoint back. `caches` know
    prompts under other salts; without them none is found.
    """

    def __init__(
        self,
        worker_id: Callable[[str], str],
        clock: Callable[[], float] | None = None,
        caches: Caches | None = None,
    ) -> None:
        self._kept = DecisionRecords()
        self._local_prefills = LocalPrefills()
        self._worker_id = worker_id
        self._clock = clock or time.monotonic
        self._caches = caches

    def observe(self, record: RequestRecord) -> None:
        """A request has ended."""
        if record.prepared is None or not record.timeline.notes:
            return  # it was refused before anyone was chosen
        timeline, gaps = record.timeline, record.gaps
        measured = stages(timeline, self._clock())
        outcome = Outcome(
            record.error or "OK",
            len(record.prepared.token_ids),
            measured.ttft_ms,
            measured.total_ms,
            gaps.p50_ms if gaps else 0.0,
            gaps.p99_ms if gaps else 0.0,
            kept.name if (kept := record.prepared.valid.kept_session) is not None else "",
        )
        for note in timeline.notes:
            self._check_prediction(note)
        request_id, trace_id = record.prepared.valid.request_id, record.identity.trace_id
        notes, waits = tuple(timeline.notes), Waits.of(measured, gaps, timeline.drafts)
        salted = self._under_other_salt(record.prepared, notes[-1])
        self._kept.add(DecisionRecord(request_id, trace_id, timeline.arrived_s, outcome, notes, waits, salted))

    def why(self, given: str) -> admin_pb2.WhyResponse:
        """Raises as `explain`."""
        found = self._find(given)
        return why_response(found, self._explained(found), self._worker_id, self._local_prefills)

    def _check_prediction(self, note: AttemptNote) -> None:
        """A prompt that a decode worker computed itself is a measured case."""
        predicted = None if note.placement.computes_for_others else colocated_of(note)
        if predicted is not None and note.first_step_s is not None:
            measured_ms = (note.first_step_s - note.placed_s) * 1e3
            self._local_prefills.take(predicted.prompt_tokens, predicted.ttft_ms, measured_ms)

    def _under_other_salt(self, prepared: PreparedRequest, note: AttemptNote) -> Held:
        """Looked up now, when no request waits for it: its own blocks have other names, and do not count."""
        if self._caches is None:
            return NOWHERE
        plain = prepared.plain_hashes(SALT_BLOCKS)
        worker = note.placement.computing
        held = self._caches.under_other_salt(prepared.block_hashes, plain, worker)
        if prepared.is_salted:
            self._caches.salted(prepared.block_hashes, plain)
        return held

    def explain(self, given: str) -> admin_pb2.ExplainResponse:
        """`given`: as DecisionRecords.find takes it. Raises: NotFound for a request that has not ended, was not served
        here, or is too long ago.
        """
        return self._explained(self._find(given))

    def _find(self, given: str) -> DecisionRecord:
        """Raises: NotFound."""
        found = self._kept.find(given)
        if found is None:
            raise NotFound("request", given)
        return found

    def _explained(self, found: DecisionRecord) -> admin_pb2.ExplainResponse:
        outcome = found.outcome
        return admin_pb2.ExplainResponse(
            request_id=found.request_id,
            age_s=self._clock() - found.arrived_s,
            prompt_tokens=outcome.prompt_tokens,
            status=outcome.status,
            attempts=[self._attempt(note) for note in found.attempts],
            ttft_ms=outcome.ttft_ms,
            total_ms=outcome.total_ms,
            tbt_p50_ms=outcome.tbt_p50_ms,
            tbt_p99_ms=outcome.tbt_p99_ms,
            session_id=outcome.session_id,
        )

    def _attempt(self, note: AttemptNote) -> admin_pb2.ExplainedAttempt:
        placement, failed = note.placement, note.failed
        return admin_pb2.ExplainedAttempt(
            candidates=self._candidates(note, note.decision) if note.decision is not None else (),
            policy=placement.policy,
            reason=self._reason(note),
            queue_ms=(note.placed_s - note.began_s) * 1e3,
            predicted=dict(_numbers(placement._asdict())),
            actual=dict(_actual(note)),
            transport=note.kv_received.transport if note.kv_received else "",
            failure=f"{failed.reason.name}: {failed.message}" if failed else "",
            failed_endpoint=failed.endpoint if failed else "",
        )

    def _candidates(self, note: AttemptNote, decision: Decision) -> Iterator[admin_pb2.ExplainedCandidate]:
        weighed = [each for each in (decision.prefill, decision.decode) if each is not None]
        terms = {endpoint: terms for each in weighed for endpoint, terms in each.terms().items()}
        costs = {endpoint: {"cost": total} for each in weighed for endpoint, total in each.totals().items()}
        for view in decision.workers:
            endpoint = view.endpoint
            own_terms = terms.get(endpoint, {})
            yield admin_pb2.ExplainedCandidate(
                worker_id=self._worker_id(endpoint),
                endpoint=endpoint,
                role=ROLES[view.role],
                chosen=endpoint in note.placement.endpoints,
                excluded=excluded(note.request, decision, view) or "",
                terms={**dict(_seen(view)), **own_terms, **costs.get(endpoint, {})},
                cost_terms=own_terms,
            )

    def _reason(self, note: AttemptNote) -> str:
        placement, decision = note.placement, note.decision
        decode = self._worker_id(placement.decode)
        if placement.local_prefill is LocalPrefill.POOLED:
            way = f"{decode} computes the prompt, and there is no answer to decode"
        elif placement.local_prefill is not None:
            way = f"{decode} computes the prompt itself: {placement.local_prefill.value.replace('_', ' ')}"
        elif placement.prefill is not None:
            way = f"{self._worker_id(placement.prefill)} computes the prompt, {decode} goes on from there"
        else:
            way = f"{decode} goes on with what it makes already"
        if decision is not None and decision.prefill is not None and placement.prefill is None:
            if decision.soonest_prefill_ms:
                way += f", first token after {decision.soonest_prefill_ms:,.0f} ms at the soonest"
            else:
                way += f"; it was taken to go on from {self._worker_id(decision.prefill.worker.endpoint)}"
        if placement.fetch_from is not None:
            way += f"; {placement.fetch_tokens} tokens may be fetched from {self._worker_id(placement.fetch_from)}"
        if placement.fetch_loaded_tokens:
            way += f", {placement.fetch_loaded_tokens} of them from its files"
        if placement.loaded_tokens:
            way += f"; {placement.loaded_tokens} tokens are loaded from files, in {placement.load_ms:,.0f} ms"
        if note.answered_tokens:
            which = "the answer" if note.choice is None else f"choice {note.choice}"
            way = f"{which} continues at token {note.answered_tokens + 1}: {way}"
        return way


def _seen(view: WorkerView) -> Iterator[tuple[str, float]]:
    """The known values of it, without zeros, except for the two that are always shown."""
    for name, value in _numbers({each.name: getattr(view, each.name) for each in fields(view)}):
        if value or name in ("tokens_in_flight", "hit_blocks"):
            yield name, value


def _actual(note: AttemptNote) -> Iterator[tuple[str, float]]:
    if note.first_step_s is not None:
        yield "ttft_ms", (note.first_step_s - note.placed_s) * 1e3
    if (prefill := note.prefill) is not None:
        computed_by = "" if note.placement.computes_for_others else "decode_"
        yield f"{computed_by}cached_tokens", prefill.found_tokens
        yield "prefill_queue_ms", prefill.queue_ms - prefill.fetch_ms
        yield "prefill_ms", sum(prefill.chunk_ms)
        if prefill.restore_ms:
            yield "loaded_tokens", prefill.restored_tokens
            yield "load_ms", prefill.restore_ms
        if prefill.fetch_ms:
            yield "fetched_tokens", prefill.fetched_tokens
            yield "fetch_ms", prefill.fetch_ms
    if (kv_received := note.kv_received) is not None:
        yield "decode_cached_tokens", kv_received.cached_tokens
        yield "transfer_bytes", kv_received.transferred_bytes
        yield "copy_ms", kv_received.copy_ms
        yield "transfer_exposed_ms", kv_received.exposed_ms
        yield "decode_admission_ms", kv_received.admission_ms


def _numbers(values: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    """The numeric ones, by name."""
    for name, value in values.items():
        if name not in _NO_TERMS | _IN_WORDS and isinstance(value, int | float):
            yield name, float(value)
