"""Rates of each worker, learned from its reports, and the latency expected for a request. Pure; reads no clock.

Each measurement reduces the weight of all earlier measurements by a tenth. A worker without enough recent measurements
is assumed to be as fast as the others.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from baton.process.registry.worker_record import WorkerRole
from baton.router.types.placement import UNMEASURED, Measured, PlacementRequest, WorkerRates, WorkerView
from baton.text.kv_loading import LoadCosts

DECAY = 0.9
PRIOR_MS = 50.0
"""Weight of the cluster's prompt rate in a worker's own, as milliseconds of computing: one short prompt measures the
rate badly.
"""
UNSEEN_DECAY = 0.98
"""Decay of the rate that was measured longest ago, at each measurement of another worker. Without it, a worker that was
once measured as slow would get no prompts, and so no measurement to correct the rate.
"""
LEAST_SPREAD = 0.2
"""Minimum standard deviation of tokens in flight, as a fraction of their mean, for which a slope is fitted."""
NEWS = 0.05
"""Minimum relative change at which a reported rate, or the rates assumed for workers without measurements, replace the
known ones. All views of such workers would otherwise be created again after each prompt.
"""
LEAST_APART_S = 0.1
"""Minimum time between two reports from which a token gap is computed: a shorter time has too few steps."""
_PREFILL = WorkerRole.PREFILL  # looking up an enum member is slow in a hot path


@dataclass(frozen=True, slots=True)
class _Steps:
    steps: int
    at_s: float


@dataclass(frozen=True, slots=True)
class _ReportedPrefill:
    """Prompt rates that a decode worker reports, in tokens per second: without and with running answers."""

    alone: float | None = None
    beside: float | None = None

    def is_like(self, other: "_ReportedPrefill") -> bool:
        return _is_close(self.alone, other.alone) and _is_close(self.beside, other.beside)


@dataclass(slots=True)
class Ratio:
    """Ratio of two decaying sums: `above` / `below`."""

    above: float = 0.0
    below: float = 0.0

    def add(self, above: float, below: float) -> None:
        self.above = self.above * DECAY + above
        self.below = self.below * DECAY + below

    @property
    def is_known(self) -> bool:
        return self.above > 0 and self.below > 0

    def value(self, unknown: float, prior: float = 0.0) -> float:
        """Return the ratio; `unknown` before any measurement. `prior`: weight of `unknown`, in units of `below`."""
        return (self.above + prior * unknown) / (self.below + prior) if self.is_known else unknown

    def age(self) -> None:
        self.above, self.below = self.above * UNSEEN_DECAY, self.below * UNSEEN_DECAY


@dataclass(slots=True)
class DecayingLine:
    """Least-squares line y = base + slope * x over measurements of decaying weight.

    Base and slope are never negative.
    """

    count: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        self.count = self.count * DECAY + 1
        self.x, self.y = self.x * DECAY + x, self.y * DECAY + y
        self.xx, self.xy = self.xx * DECAY + x * x, self.xy * DECAY + x * y

    def fit(self, base: float, slope: float) -> tuple[float, float]:
        """Return base and slope of the line. Without measurements, the arguments are returned. If x hardly varied, the
        argument `slope` is used.
        """
        if self.count == 0:
            return base, slope
        mean_x, mean_y = self.x / self.count, self.y / self.count
        variance = self.xx / self.count - mean_x * mean_x
        if variance > (LEAST_SPREAD * mean_x) ** 2:
            slope = max(0.0, (self.xy / self.count - mean_x * mean_y) / variance)
        slope = min(slope, mean_y / mean_x) if mean_x > 0 else slope
        return mean_y - slope * mean_x, slope


class RateLedger:
    """Measured rates of all workers. Workers are named by endpoint."""

    def __init__(self) -> None:
        self._prefill: dict[str, Ratio] = {}  # tokens per ms, by worker; the last entry is the newest measurement
        self._gaps: dict[str, DecayingLine] = {}  # by worker: line of token gap in ms over tokens in flight
        self._steps: dict[str, _Steps] = {}
        self._reported_prefill: dict[str, _ReportedPrefill] = {}
        self._links: dict[str, Mapping[str, float]] = {}
        self._any_prefill, self._any_gap = Ratio(), DecayingLine()
        self._kv = Ratio()  # KV bytes / tokens, equal on all workers of a model
        self._known: dict[str, WorkerRates] = {}
        self._typical = UNMEASURED

    def of(self, worker: str) -> WorkerRates:
        """Return the worker's rates: the same object until they change."""
        return self._known.get(worker, self._typical)

    def computed(self, worker: str, tokens: int, chunks_ms: float) -> None:
        """Record the number of computed tokens of a prompt and the compute time of its chunks."""
        if tokens > 0 and chunks_ms > 0:
            own = self._prefill.pop(worker, None) or Ratio()
            self._prefill[worker] = own
            for ratio in (own, self._any_prefill):
                ratio.add(tokens, chunks_ms)
            self._renew(worker)
            if len(self._prefill) > 1:
                self._age(next(iter(self._prefill)))

    def _age(self, worker: str) -> None:
        ratio = self._prefill.pop(worker)
        ratio.age()
        self._prefill[worker] = ratio
        self._renew(worker)

    def reported_prefill(
        self, worker: str, alone_tokens_per_s: float | None, beside_tokens_per_s: float | None
    ) -> None:
        """Record the prompt rates that a decode worker reported: without and with running answers."""
        reported = _ReportedPrefill(alone_tokens_per_s, beside_tokens_per_s)
        if not reported.is_like(self._reported_prefill.get(worker, _ReportedPrefill())):
            self._reported_prefill[worker] = reported
            self._renew(worker)

    def stepped(self, worker: str, tokens_in_flight: int, gap_ms: float) -> None:
        """Record a measured token gap of the worker's answers, and the number of tokens in flight at that time."""
        if gap_ms > 0:
            for line in (self._gaps.setdefault(worker, DecayingLine()), self._any_gap):
                line.add(tokens_in_flight, gap_ms)
            self._renew(worker)

    def reported(self, worker: str, steps: int, is_running: bool, tokens_in_flight: int, now: float) -> None:
        """Record a decode worker's step count; compute the token gap from the last two counts."""
        before = self._steps.get(worker)
        if not is_running:
            self._steps.pop(worker, None)
        elif before is None or now - before.at_s >= LEAST_APART_S:
            self._steps[worker] = _Steps(steps, now)
            if before is not None and steps > before.steps:
                self.stepped(worker, tokens_in_flight, 1e3 * (now - before.at_s) / (steps - before.steps))

    def transferred(self, tokens: int, kv_bytes: int) -> None:
        if tokens > 0 and kv_bytes > 0:
            self._kv.add(kv_bytes, tokens)
            kv_bytes_per_token = self._kv.value(0.0)
            if not _is_close(kv_bytes_per_token, self._typical.kv_bytes_per_token):
                self._typical = replace(self._typical, kv_bytes_per_token=kv_bytes_per_token)
                self._known = {
                    name: replace(each, kv_bytes_per_token=kv_bytes_per_token) for name, each in self._known.items()
                }

    def linked(self, worker: str, links_gb_per_s: Mapping[str, float]) -> None:
        """Record the rates at which the worker reads KV from other workers, by the endpoint of the source."""
        if links_gb_per_s != self._links.get(worker, {}):
            self._links[worker] = dict(links_gb_per_s)
            self._renew(worker)

    def forget(self, worker: str) -> None:
        of_workers: tuple[dict[str, Any], ...]
        of_workers = (self._prefill, self._gaps, self._steps, self._reported_prefill, self._links, self._known)
        for each in of_workers:
            each.pop(worker, None)

    def _renew(self, worker: str) -> None:
        typical = self._rates(self._any_prefill, self._any_gap, {}, UNMEASURED, Measured.ELSEWHERE, prior_ms=0.0)
        if not _are_close(typical, self._typical):
            self._typical = typical
        prefill, gaps = self._prefill.get(worker, Ratio()), self._gaps.get(worker, DecayingLine())
        rates = self._rates(prefill, gaps, self._links.get(worker, {}), typical)
        reported = self._reported_prefill.get(worker, _ReportedPrefill())
        if reported.alone:
            rates = replace(rates, prefill_tokens_per_s=reported.alone, prefill_measured=Measured.HERE)
        self._known[worker] = replace(rates, beside_tokens_per_s=reported.beside)

    def _rates(
        self,
        prefill: Ratio,
        gaps: DecayingLine,
        links_gb_per_s: Mapping[str, float],
        unknown: WorkerRates,
        measured: Measured = Measured.HERE,
        prior_ms: float = PRIOR_MS,
    ) -> WorkerRates:
        base_ms, slope_ms = gaps.fit(unknown.token_gap_ms, unknown.token_gap_ms_per_token)
        known = [rate for rate in links_gb_per_s.values() if rate > 0]
        return WorkerRates(
            prefill_tokens_per_s=1e3 * prefill.value(unknown.prefill_tokens_per_s / 1e3, prior_ms),
            token_gap_ms=base_ms,
            token_gap_ms_per_token=slope_ms,
            kv_bytes_per_token=self._kv.value(unknown.kv_bytes_per_token),
            link_gb_per_s=sum(known) / len(known) if known else unknown.link_gb_per_s,
            links_gb_per_s={name: rate for name, rate in links_gb_per_s.items() if rate > 0},
            prefill_measured=measured if prefill.is_known else unknown.prefill_measured,
        )


def _is_close(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return abs(one - other) <= NEWS * max(one, other)


def _are_close(one: WorkerRates, other: WorkerRates) -> bool:
    """Return whether two assumed rates differ so little that the older ones may stay."""
    return one.prefill_measured is other.prefill_measured and all(
        _is_close(getattr(one, name), getattr(other, name)) for name in _ASSUMED
    )


_ASSUMED = ("prefill_tokens_per_s", "token_gap_ms", "token_gap_ms_per_token", "kv_bytes_per_token", "link_gb_per_s")


ATTENTION_TOKENS = 4096
"""Assumed number of prompt tokens at which attention doubles the time of a prompt next to answers. The rate next to
answers is learned from few tokens in each step, most of them at the start of a prompt.
"""

CAUTION, MOST_ASSUMED = 0.1, 0.5
"""Fractions of a decode worker's prompt rate: what is assumed at least, and at most, while answers run, until the
worker reports that rate. In between, it is half of the time that the answers' tokens leave of a TBT objective.
"""


class Expected(NamedTuple):
    """Expected TTFT of a prompt at one worker, as the sum of three times."""

    wait_ms: float  # time in the queue behind other prompts
    compute_ms: float  # compute time of tokens that are neither cached nor loaded
    load_ms: float = 0.0  # loading time that exceeds wait_ms: blocks are loaded while the prompt waits

    @property
    def ttft_ms(self) -> float:
        return self.wait_ms + self.compute_ms + self.load_ms


ASSUMED_LOAD_BYTES_PER_S = 1e9
"""Assumed rate of loading from files until a worker has measured its own."""


class Loading(NamedTuple):
    """Blocks of a prompt that a worker loads from files, and the loading time."""

    blocks: int
    ms: float


NOTHING_LOADED = Loading(0, 0.0)


def loading(request: PlacementRequest, worker: WorkerView) -> Loading:
    """Return the blocks that the worker would load from files by its own rule: none if computing is faster."""
    reusable = request.reusable_blocks
    blocks = min(worker.tier_blocks, reusable - min(worker.hit_blocks, reusable))
    if blocks <= 0:
        return NOTHING_LOADED
    costs = load_costs(request, worker, worker.rates.prefill_tokens_per_s)
    load_s = costs.load_s(blocks)
    return Loading(blocks, 1e3 * load_s) if load_s is not None and costs.favour_loading(blocks) else NOTHING_LOADED


def exposed_load_ms(loaded: Loading, worker: WorkerView, wait_ms: float) -> float:
    """Return the loading time in ms that is left after `wait_ms`, when all earlier prompts are computed."""
    return max(0.0, worker.loading_ms + loaded.ms - wait_ms) if loaded.blocks else 0.0


def load_costs(request: PlacementRequest, worker: WorkerView, compute_tokens_per_s: float) -> LoadCosts:
    rate = worker.load_bytes_per_s or ASSUMED_LOAD_BYTES_PER_S
    return LoadCosts(request.block_tokens, worker.tier_block_bytes, compute_tokens_per_s, rate)


def known_tokens(request: PlacementRequest, worker: WorkerView) -> int:
    """Return the number of leading prompt tokens that the worker need not compute."""
    hit_tokens = request.hit_tokens(worker)
    return hit_tokens + request.block_tokens * loading(request, worker).blocks if worker.tier_blocks else hit_tokens


def prompt_tokens_per_s(worker: WorkerView, tbt_slo_ms: float = math.inf) -> float:
    """Return the worker's present prompt rate; a decode worker's is lower while answers run.

    `tbt_slo_ms`: TBT objective of the answers; infinite: none.
    """
    rates = worker.rates
    if worker.role is _PREFILL or not has_answers(worker):
        return rates.prefill_tokens_per_s
    if rates.beside_tokens_per_s is not None:
        return rates.beside_tokens_per_s
    gap_ms = rates.token_gap_ms + rates.token_gap_ms_per_token * worker.tokens_in_flight
    share = CAUTION if tbt_slo_ms == math.inf else max(CAUTION, MOST_ASSUMED * (1.0 - gap_ms / tbt_slo_ms))
    return share * rates.prefill_tokens_per_s


def has_answers(worker: WorkerView) -> bool:
    """Return whether a decode worker has running answers, or prompts whose answers will run."""
    return bool(worker.tokens_in_flight or worker.used_slots or worker.elsewhere_slots or worker.pending_prompt_tokens)


def expected_here(request: PlacementRequest, worker: WorkerView) -> Expected:
    """Return the expected TTFT of the request if this worker computes the prompt."""
    blocks, reusable = worker.hit_blocks, request.reusable_blocks
    own_tokens = request.prompt_tokens - request.block_tokens * (blocks if blocks < reusable else reusable)
    loaded = NOTHING_LOADED
    if worker.tier_blocks:
        loaded = loading(request, worker)
        own_tokens -= request.block_tokens * loaded.blocks
    if worker.role is _PREFILL:
        before_tokens, per_token_ms = worker.tokens_in_flight, 1e3 / worker.rates.prefill_tokens_per_s
    else:
        before_tokens = worker.pending_prompt_tokens
        per_token_ms = 1e3 / prompt_tokens_per_s(worker, request.tbt_slo_ms)
    wait_ms, compute_ms = before_tokens * per_token_ms, own_tokens * per_token_ms
    if worker.role is not _PREFILL and has_answers(worker):
        compute_ms *= 1.0 + own_tokens / ATTENTION_TOKENS
    load_ms = exposed_load_ms(loaded, worker, wait_ms) if loaded.blocks else 0.0
    return Expected(wait_ms, compute_ms, load_ms)


def expected_ttft_ms(request: PlacementRequest, worker: WorkerView) -> float:
    return sum(expected_here(request, worker))


def token_gap_ms(request: PlacementRequest, worker: WorkerView) -> float:
    """Return the expected time between tokens of an answer at the worker when this request runs there, too."""
    tokens = worker.tokens_in_flight + request.prompt_tokens
    return worker.rates.token_gap_ms + worker.rates.token_gap_ms_per_token * tokens
