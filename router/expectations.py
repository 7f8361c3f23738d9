"""The latency that a request may expect of a worker, from measured rates: TTFT, and time between tokens. Pure."""

from typing import NamedTuple

from router.candidates import PlacementRequest, WorkerView
from router.worker import WorkerRole

CAUTION = 0.1
"""Share of the rate at prompts alone, assumed beside answers until a decode worker reports its own: not to flood it."""

_PREFILL = WorkerRole.PREFILL  # looked up for every decision


class Expected(NamedTuple):
    """Of a prompt that this worker computes."""

    wait_ms: float  # for the prompts before it
    compute_ms: float  # the part of it that is not cached there

    @property
    def ttft_ms(self) -> float:
        return self.wait_ms + self.compute_ms


def prompt_tokens_per_s(worker: WorkerView) -> float:
    """Of prompts, there and now. Where a decode worker has answers, or prompts that will be answers, they bound it."""
    rates = worker.rates
    if worker.role is _PREFILL or not has_answers(worker):
        return rates.prefill_tokens_per_s
    beside = rates.beside_tokens_per_s
    return CAUTION * rates.prefill_tokens_per_s if beside is None else beside


def has_answers(worker: WorkerView) -> bool:
    """Of a decode worker: whether anything runs there or is on its way. Each prompt will be an answer."""
    return bool(worker.tokens_in_flight or worker.used_slots or worker.elsewhere_slots or worker.pending_prompt_tokens)


def expected_here(request: PlacementRequest, worker: WorkerView) -> Expected:
    """A decode worker puts tokens of answers before those of prompts."""
    blocks, reusable = worker.hit_blocks, request.reusable_blocks
    own_tokens = request.prompt_tokens - request.block_tokens * (blocks if blocks < reusable else reusable)
    if worker.role is _PREFILL:
        before_tokens, per_token_ms = worker.tokens_in_flight, 1e3 / worker.rates.prefill_tokens_per_s
    else:
        before_tokens, per_token_ms = worker.pending_prompt_tokens, 1e3 / prompt_tokens_per_s(worker)
    return Expected(before_tokens * per_token_ms, own_tokens * per_token_ms)


def expected_ttft_ms(request: PlacementRequest, worker: WorkerView) -> float:
    return sum(expected_here(request, worker))


def token_gap_ms(request: PlacementRequest, worker: WorkerView) -> float:
    """Between two tokens of an answer made here, with this request among the others."""
    tokens = worker.tokens_in_flight + request.prompt_tokens
    return worker.rates.token_gap_ms + worker.rates.token_gap_ms_per_token * tokens


def transfer_ms(request: PlacementRequest, decode: WorkerView, prefill: WorkerView) -> float:
    """Of the part of the prompt's KV that the decode worker lacks, over the link between the two."""
    rates = decode.rates
    gb_per_s = rates.links_gb_per_s.get(prefill.endpoint, rates.link_gb_per_s)
    missing_tokens = request.prompt_tokens - request.hit_tokens(decode)
    return missing_tokens * rates.kv_bytes_per_token / (1e6 * gb_per_s)
