"""The worker with the lowest expected time, where a cached prefix counts for more than the time it saves this request.

By expected time alone, a conversation leaves its cache whenever its worker is a moment busier than another, and the
next turns are computed anew as well: hits fall by a sixth to a third (docs/routing.md). So each token that would be
computed again, though some worker has it, costs KEEP times its time. PATIENCE_MS bounds that premium, so that a prefix
which more requests want than one worker can serve is computed on another, and then on a third. The shortest wait is
added to the bound, since under overload computing twice gains nothing. A prefix that every worker has makes no
difference.
Recent work counts a little (BALANCE): among idle workers the one that did least of it is next, which also keeps their
evictions equally old.
"""

from collections.abc import Sequence
from operator import attrgetter, mul

from router.candidates import PlacementRequest, WorkerView
from router.expectations import expected_here, prompt_tokens_per_s, token_gap_ms, transfer_ms
from router.policies.policy import Policy, Terms
from router.policies.rendezvous import home_of

KEEP, KEEP_SHARED = 40.0, 4.0
PATIENCE_MS = 10_000.0
BALANCE = 0.2
BUSY_FACTOR, BUSY_MS = 2.0, 1_000.0
"""Prefill workers are busier than it is worth where a decode worker, whose other answers a prompt slows down, would
have the first token in less than so many times shorter, and so much less, time."""


_HIT_BLOCKS = attrgetter("hit_blocks")


class CacheAware(Policy):
    """Costs are milliseconds: expected ones, and what is added to weigh what comes after this request."""

    def prefill_costs(self, request: PlacementRequest, workers: Sequence[WorkerView]) -> Sequence[float]:
        return _prompt_costs(request, workers, [worker.tokens_in_flight for worker in workers])

    def prefill_terms(self, request: PlacementRequest, workers: Sequence[WorkerView]) -> Sequence[Terms]:
        longest_ms = PATIENCE_MS + min(expected_here(request, worker).wait_ms for worker in workers)
        homes, keep = _homes(request, workers), _keep(workers)
        best_tokens = max(request.hit_tokens(worker) for worker in workers)
        terms = []
        for worker, home in zip(workers, homes, strict=True):
            expected, pace = expected_here(request, worker), 1e3 / prompt_tokens_per_s(worker)
            again_ms = (keep - 1.0) * (best_tokens - request.hit_tokens(worker)) * pace
            terms.append(
                {
                    "wait_ms": expected.wait_ms,
                    "compute_ms": expected.compute_ms,
                    "affinity_ms": min(again_ms, longest_ms) if request.session is None else longest_ms * home,
                    "balance_ms": BALANCE * worker.recent_tokens * pace,
                }
            )
        return terms

    def decode_costs(
        self, request: PlacementRequest, workers: Sequence[WorkerView], prefill: WorkerView | None
    ) -> Sequence[float]:
        if prefill is not None:
            return _remote_costs(request, workers, prefill)
        prompts = _prompt_costs(request, workers, [worker.pending_prompt_tokens for worker in workers])
        answer_tokens = request.charged_answer_tokens
        return [
            prompt_ms + answer_tokens * token_gap_ms(request, worker)
            for worker, prompt_ms in zip(workers, prompts, strict=True)
        ]

    def decode_terms(
        self, request: PlacementRequest, workers: Sequence[WorkerView], prefill: WorkerView | None
    ) -> Sequence[Terms]:
        """Of an answer of charged length."""
        answers = [request.charged_answer_tokens * token_gap_ms(request, worker) for worker in workers]
        if prefill is None:
            prompts = self.prefill_terms(request, workers)
            return [{**prompt, "answer_ms": answer_ms} for prompt, answer_ms in zip(prompts, answers, strict=True)]
        expected = expected_here(request, prefill)
        return [
            {
                "first_token_ms": expected.ttft_ms,
                "transfer_ms": max(0.0, transfer_ms(request, worker, prefill) - expected.compute_ms),
                "answer_ms": answer_ms,
                "affinity_ms": PATIENCE_MS * home,
            }
            for worker, answer_ms, home in zip(workers, answers, _homes(request, workers), strict=True)
        ]

    def local_limit_ms(self, prefill_ms: float) -> float | None:
        limit_ms = (prefill_ms - BUSY_MS) / BUSY_FACTOR
        return limit_ms if limit_ms > 0 else None


def _prompt_costs(
    request: PlacementRequest, workers: Sequence[WorkerView], waiting_tokens: Sequence[int]
) -> list[float]:
    """The sums of `prefill_terms`, written for speed: this runs for every worker and request."""
    prompt_tokens, reusable, block_tokens = request.prompt_tokens, request.reusable_blocks, request.block_tokens
    costs, hits, paces = [], [], []
    for worker, waiting in zip(workers, waiting_tokens, strict=True):
        pace, blocks = 1e3 / prompt_tokens_per_s(worker), worker.hit_blocks  # milliseconds per token
        hit_tokens = (blocks if blocks < reusable else reusable) * block_tokens
        costs.append((waiting + prompt_tokens - hit_tokens + BALANCE * worker.recent_tokens) * pace)
        hits.append(hit_tokens)
        paces.append(pace)
    best_tokens = max(hits)
    if best_tokens == min(hits) and request.session is None:
        return costs
    longest_ms = PATIENCE_MS + min(map(mul, waiting_tokens, paces))
    if request.session is not None:
        return [cost + longest_ms * home for cost, home in zip(costs, _homes(request, workers), strict=True)]
    extra = _keep(workers) - 1.0
    premiums = [extra * (best_tokens - hit_tokens) * pace for hit_tokens, pace in zip(hits, paces, strict=True)]
    return [cost + (more if more < longest_ms else longest_ms) for cost, more in zip(costs, premiums, strict=True)]


def _remote_costs(request: PlacementRequest, workers: Sequence[WorkerView], prefill: WorkerView) -> list[float]:
    """Of decode workers that take the KV over from `prefill`; the sums of `decode_terms`, written for speed."""
    expected, source = expected_here(request, prefill), prefill.endpoint
    first_ms, hidden_ms = expected.ttft_ms, expected.compute_ms
    prompt_tokens, answer_tokens = request.prompt_tokens, request.charged_answer_tokens
    reusable, block_tokens = request.reusable_blocks, request.block_tokens
    costs = []
    for worker in workers:
        rates, blocks = worker.rates, worker.hit_blocks
        missing_tokens = prompt_tokens - (blocks if blocks < reusable else reusable) * block_tokens
        bytes_per_ms = 1e6 * rates.links_gb_per_s.get(source, rates.link_gb_per_s)
        exposed_ms = missing_tokens * rates.kv_bytes_per_token / bytes_per_ms - hidden_ms
        gap_ms = rates.token_gap_ms + rates.token_gap_ms_per_token * (worker.tokens_in_flight + prompt_tokens)
        costs.append(first_ms + answer_tokens * gap_ms + (exposed_ms if exposed_ms > 0.0 else 0.0))
    if request.session is None:
        return costs
    return [cost + PATIENCE_MS * home for cost, home in zip(costs, _homes(request, workers), strict=True)]


def _keep(workers: Sequence[WorkerView]) -> float:
    """The less, the more prompts go on from where this one leaves what is known of it."""
    best = max(workers, key=_HIT_BLOCKS)
    return max(KEEP_SHARED, KEEP / (1 + best.branches))


def _homes(request: PlacementRequest, workers: Sequence[WorkerView]) -> list[int]:
    """How many homes away from the session's: 0 or 1; all 0 where there is no session."""
    if request.session is None:
        return [0] * len(workers)
    home = home_of(request.session.encode(), workers)
    return [int(worker is not home) for worker in workers]
