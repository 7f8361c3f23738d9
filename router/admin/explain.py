"""Explanations of completed requests. `explain` gives the reasons of a request's placement; `why` adds the time of each
stage and the fate of the prompt's cached blocks. An explanation is generated only when it is requested.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields

from baton.process.errors import NotFound
from baton.protos import admin_pb2
from baton.router.admin.requests import request_drafts, request_stall
from baton.router.admin.why import cache_autopsy, colocated_message, colocated_of
from baton.router.admin.wire import ROLES
from baton.router.cache.autopsy import NOWHERE, SALT_BLOCKS, Held
from baton.router.cache.replica import Caches
from baton.router.placement.colocated import LocalPrefills
from baton.router.placement.decide import Decision, LocalPrefill, excluded
from baton.router.trace.record import AttemptNote, RequestRecord
from baton.router.trace.report import RecentReports, RequestReport, shown_stalls
from baton.router.types.placement import WorkerView
from baton.router.types.request import PreparedRequest

_NO_TERMS = frozenset({"endpoint", "role", "fingerprint", "adapters"})
_IN_WORDS = frozenset({"prefill", "decode", "local_prefill", "fetch_from", "policy"})


class Explainer:
    """Generates explanations of the requests in `reports`."""

    def __init__(
        self,
        reports: RecentReports,
        worker_id: Callable[[str], str],
        clock: Callable[[], float] = time.monotonic,
        caches: Caches | None = None,
    ) -> None:
        """Create the explainer. `worker_id` returns the id of the worker at an endpoint.

        `caches`: searched for prompts that are cached under another salt; None: no search.
        """
        self._reports = reports
        self._local_prefills = LocalPrefills()
        self._worker_id = worker_id
        self._clock = clock
        self._caches = caches

    def observe(self, record: RequestRecord) -> None:
        """Check the predictions for a completed request, and look for its prompt under other salts."""
        if record.prepared is None or not record.timeline.notes:
            return  # the request was rejected before a worker was chosen
        for note in record.timeline.notes:
            self._check_prediction(note)
        record.salted = self._under_other_salt(record.prepared, record.timeline.notes[-1])

    def _check_prediction(self, note: AttemptNote) -> None:
        """If a decode worker computed the prompt, record the predicted and the measured time to its first token."""
        predicted = None if note.placement.computes_for_others else colocated_of(note)
        if predicted is not None and note.first_step_s is not None:
            measured_ms = (note.first_step_s - note.placed_s) * 1e3
            self._local_prefills.take(predicted.prompt_tokens, predicted.ttft_ms, measured_ms)

    def _under_other_salt(self, prepared: PreparedRequest, note: AttemptNote) -> Held:
        """Return the prefix of the prompt that is now cached under another salt."""
        if self._caches is None:
            return NOWHERE
        plain = prepared.plain_hashes(SALT_BLOCKS)
        held = self._caches.under_other_salt(prepared.block_hashes, plain, note.placement.computing)
        if prepared.is_salted:
            self._caches.salted(prepared.block_hashes, plain)
        return held

    def explain(self, given: str) -> admin_pb2.ExplainResponse:
        """Explain the placement of the request with the id `given`.

        Raises: NotFound if the request is still running, was never placed, was served by another router, or is too old.
        """
        return self._placed(self._find(given))

    def why(self, given: str) -> admin_pb2.WhyResponse:
        """Explain a request's placement, its time and its cached blocks. Raises: NotFound, as `explain`."""
        found = self._find(given)
        gaps, drafts, change = found.gaps, request_drafts(found.drafts), found.prompt_change
        number = _computing_attempt(found)
        note = found.notes[number - 1]
        known = note.decision is not None
        return admin_pb2.WhyResponse(
            placed=self._placed(found),
            stages=admin_pb2.RequestStages(**asdict(found.stages)),
            stalls=[request_stall(stall, found.arrived_s, self._worker_id) for stall in shown_stalls(gaps)],
            stall_count=gaps.stall_count if gaps is not None else 0,
            longest_gap_ms=gaps.max_ms if gaps is not None else 0.0,
            drafts=drafts,
            not_acted_upon=found.not_acted_upon,
            prompt_change=admin_pb2.PromptChange(**change._asdict()) if change is not None else None,
            cache=cache_autopsy(note, number, found.salted, self._worker_id) if known else None,
            colocated=colocated_message(note, self._local_prefills, self._worker_id) if known else None,
        )

    def _find(self, given: str) -> RequestReport:
        """Return the report of a placed request. Raises: NotFound."""
        found = self._reports.find(given)
        if found is None or not found.notes:
            raise NotFound("request", given)
        return found

    def _placed(self, found: RequestReport) -> admin_pb2.ExplainResponse:
        return admin_pb2.ExplainResponse(
            request_id=found.request_id,
            age_s=self._clock() - found.arrived_s,
            prompt_tokens=found.prompt_tokens,
            status=found.status,
            attempts=[self._attempt(note) for note in found.notes],
            ttft_ms=found.stages.ttft_ms,
            total_ms=found.stages.total_ms,
            tbt_p50_ms=found.gaps.p50_ms if found.gaps is not None else 0.0,
            tbt_p99_ms=found.gaps.p99_ms if found.gaps is not None else 0.0,
            session_id=found.session_id,
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
                terms={**dict(_known_values(view)), **own_terms, **costs.get(endpoint, {})},
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
            way = f"{self._worker_id(placement.prefill)} computes the prompt, {decode} continues from there"
        else:
            way = f"{decode} continues the answer that it generates already"
        if decision is not None and decision.prefill is not None and placement.prefill is None:
            if decision.soonest_prefill_ms:
                way += f", no first token before {decision.soonest_prefill_ms:,.0f} ms"
            else:
                way += f"; it was chosen to continue from {self._worker_id(decision.prefill.worker.endpoint)}"
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


def _computing_attempt(found: RequestReport) -> int:
    """Return the number (from 1) of the attempt that computed the first token; if none did, of the last attempt."""
    computed = (number for number, note in enumerate(found.notes, 1) if note.first_step_s is not None)
    return next(computed, len(found.notes))


def _known_values(view: WorkerView) -> Iterator[tuple[str, float]]:
    """Yield the names and values of a worker's numbers. Zeros are left out, except for two that are always shown."""
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
    """Yield the names and values of numbers that an explanation shows."""
    for name, value in values.items():
        if name not in _NO_TERMS | _IN_WORDS and isinstance(value, int | float):
            yield name, float(value)
