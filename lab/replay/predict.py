"""Prediction of each request's TTFT: the record's load on a simulated cluster with the record's own step times.

Router, schedulers and transfers are the real code in virtual time; see `lab/sizing/cluster.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from baton.engine.request import Chunk, Plan
from baton.lab.replay.fit import StepFit, fit_steps, gap_between_steps_s
from baton.lab.replay.load import calls_of
from baton.lab.replay.record import IncidentRecord, RecordedRequest
from baton.lab.simulation.processes import PORT
from baton.lab.sizing.cluster import ClusterShape, SimulatedCluster, quiet
from baton.lab.sizing.costs import Overheads, StepCosts
from baton.launch import CommandFailed
from baton.process.registry.worker_record import WorkerRole
from baton.router.process import RouterProcess
from baton.router.trace.report import RequestReport
from baton.router.types.placement import WorkerView

SEED = 0
RATE_TOKENS = 100_000  # weight of a recorded prompt rate in a simulated router's ledger, in tokens


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Changes of a replay: requests that do not arrive, and added workers."""

    without: tuple[str, ...] = ()
    add_prefill: int = 0
    add_decode: int = 0

    @property
    def changes(self) -> bool:
        return bool(self.without or self.add_prefill or self.add_decode)

    def __str__(self) -> str:
        parts = [f"without {name}" for name in self.without]
        parts += [
            f"with {count} more {role} worker{'s' * (count > 1)}"
            for role, count in (("prefill", self.add_prefill), ("decode", self.add_decode))
            if count
        ]
        return " and ".join(parts)


@dataclass(frozen=True, slots=True)
class PredictedRequest:
    """Request of the simulated cluster. `ttft_ms`: 0 if it had no token. Workers are named by role and number."""

    request_id: str
    ttft_ms: float
    cached_tokens: int
    prefill: str  # empty: the decode worker computed the prompt
    decode: str
    workers: tuple[WorkerView, ...]  # inputs of its last placement


@dataclass(frozen=True, slots=True)
class ReplayScenario:
    """Requests, workers and settings that a replay simulates."""

    shape: ClusterShape
    overheads: Overheads
    flags: tuple[str, ...]
    fits: Mapping[WorkerRole, StepFit]
    requests: tuple[RecordedRequest, ...]
    views: tuple[WorkerView, ...]  # the first placement's inputs: they have the rates that the router knew

    def costs_of(self, role: WorkerRole) -> StepCosts:
        """Return the step costs of a role; those of the other role if the record has no step of it."""
        return self.fits.get(role) or next(iter(self.fits.values()))


def scenario_of(record: IncidentRecord, what_if: WhatIf = WhatIf()) -> ReplayScenario | None:
    """Return the scenario of a record with changes; None without steps or placed requests. Raises: CommandFailed."""
    ids = {each.request_id for each in record.requests}
    if unknown := [name for name in what_if.without if name not in ids]:
        raise CommandFailed(f"--without {unknown[0]}: the record has no such request")
    fits = {role: fit for role in WorkerRole if (fit := fit_steps(record.of_role(role.value))) is not None}
    requests = tuple(
        each
        for each in record.requests
        if each.placements and not each.pooled and each.request_id not in what_if.without
    )
    if not fits or not requests:
        return None
    return ReplayScenario(
        _shape(record, what_if), _overheads(record), _flags(record), fits, requests, _first_views(record)
    )


def predict(scenario: ReplayScenario) -> tuple[PredictedRequest, ...]:
    """Run the simulation in this process, which should then exit by `os._exit`, see lab/sizing/__main__.py."""
    fit = scenario.costs_of(WorkerRole.PREFILL)
    rate = fit.seconds(_PROMPT) / len(_PROMPT.chunks[0].token_ids)
    calls = list(calls_of(scenario.requests, rate))
    with quiet():
        cluster = SimulatedCluster(
            scenario.shape,
            scenario.costs_of,
            scenario.overheads,
            SEED,
            scenario.flags,
            lambda router: _teach_rates(router, scenario.views),
        )
        cluster.run(calls)
    names = {each.request_id for each in scenario.requests}
    return tuple(_predicted(each) for each in cluster.reports if each.request_id in names)


_PROMPT = Plan((Chunk(0, (0,) * 256, 0, ()),))
"""Step that shows the rate of computing prompts."""


def _shape(record: IncidentRecord, what_if: WhatIf) -> ClusterShape:
    prefill, decode = record.of_role("prefill"), record.of_role("decode")
    of_prefill, of_decode = (next((each.scheduler for each in of if each.scheduler), {}) for of in (prefill, decode))
    settings = of_decode or of_prefill
    longest = max(each.prompt_tokens + max(1, each.answer_tokens) for each in record.requests)
    return ClusterShape(
        len(prefill) + what_if.add_prefill,
        len(decode) + what_if.add_decode,
        kv_tokens=int(settings["total_blocks"] * settings["block_tokens"]),
        context_tokens=longest + 1,
        max_sequences=int(of_decode.get("max_sequences", 1)),
        chunk_tokens=int((of_prefill or of_decode)["max_step_tokens"]),
        tail_tokens=int(of_prefill.get("tail_tokens", 0)),
        block_tokens=int(settings["block_tokens"]),
        decode_chunk_tokens=int(settings["max_step_tokens"]),
        tbt_s=of_decode.get("tbt_s"),
    )


def _overheads(record: IncidentRecord) -> Overheads:
    """Return the record's own times of messages, of KV and between steps; defaults for those that it lacks."""
    known = Overheads()
    returns_ms = [each.return_ms for each in record.requests if each.ttft_ms and each.return_ms > 0.0]
    sizes = [
        each.transfer.bytes / (each.prompt_tokens - each.cached_tokens)
        for worker in record.of_role("decode")
        for each in worker.worker_requests
        if each.transfer is not None and each.prompt_tokens > each.cached_tokens
    ]
    rates = [
        rate
        for request in record.requests
        for placed in request.placements
        for view in placed.workers or ()
        for rate in view.rates.links_gb_per_s.values()
    ]
    return replace(
        known,
        message_s=median(returns_ms) / 2e3 if returns_ms else known.message_s,  # there and back
        step_s=gap_between_steps_s(record.workers),
        kv_bytes_per_token=median(sizes) if sizes else known.kv_bytes_per_token,
        kv_bytes_per_s=1e9 * median(rates) if rates else known.kv_bytes_per_s,
    )


def _flags(record: IncidentRecord) -> tuple[str, ...]:
    """Return the recorded router's settings as flags."""
    settings, policy = record.settings, record.settings.policy
    values = {
        "placement": policy.strategy.value,
        "no-prefill-worker": policy.no_prefill_worker.value,
        "local-prefill-tokens": policy.local_prefill_tokens,
        "ttft-slo-ms": settings.ttft_slo_ms,
        "tbt-slo-ms": settings.tbt_slo_ms,
    }
    return tuple(text for name, value in values.items() for text in (f"--{name}", str(value)))


def simulated_names(record: IncidentRecord) -> Mapping[str, str]:
    """Return the simulated worker of each recorded one, by endpoint."""
    roles = (record.of_role(role.value) for role in WorkerRole)
    return {each.endpoint: f"{each.role}-{number}" for role in roles for number, each in enumerate(role)}


def _first_views(record: IncidentRecord) -> tuple[WorkerView, ...]:
    names = simulated_names(record)
    recorded = (placed.workers for request in record.requests for placed in request.placements if placed.workers)
    return tuple(
        replace(view, endpoint=f"{names[view.endpoint]}:{PORT}")
        for view in next(recorded, ())
        if view.endpoint in names
    )


def _teach_rates(router: RouterProcess, views: Sequence[WorkerView]) -> None:
    """Record the rates that the recorded router knew when the record began."""
    rates = router.cluster.rates
    for view in views:
        known = view.rates
        if view.role is WorkerRole.PREFILL:
            rates.computed(view.endpoint, RATE_TOKENS, 1e3 * RATE_TOKENS / known.prefill_tokens_per_s)
        else:
            rates.stepped(view.endpoint, 0, known.token_gap_ms)


def _predicted(report: RequestReport) -> PredictedRequest:
    workers = next((note.decision.workers for note in reversed(report.notes) if note.decision is not None), ())
    prefill, decode = (endpoint.partition(":")[0] for endpoint in (report.prefill, report.decode))
    return PredictedRequest(
        report.request_id, report.stages.ttft_ms, report.cached_tokens, prefill, decode, tuple(workers)
    )
