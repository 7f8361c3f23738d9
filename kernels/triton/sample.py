"""Tokens from logits: kernels/sampling.py on a GPU. One program a row, without sorting it.

Both filters are thresholds on logits. One is found by trying PIVOTS of them in each pass over the row, and looking next
between the two that the answer lies between, from the smallest logit there to the largest: four or five passes, since
few distinct logits remain. Logits are compared as integers in the same order, so that this ends, exactly.
"""

import torch
import triton
import triton.language as tl

from baton.kernels.triton.launch import SAMPLE_PIVOTS, SAMPLE_TOKENS, KernelCall
from baton.kernels.types import Sampled

_INFINITY = tl.constexpr(float("inf"))
_LARGEST_KEY = tl.constexpr(0x7FFFFFFF)


def sample_tokens(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, uniform: torch.Tensor
) -> Sampled:
    rows = len(logits)
    sampled = Sampled(
        torch.empty(rows, dtype=torch.int64, device=logits.device),
        torch.empty(rows, dtype=torch.float32, device=logits.device),
    )
    sample_call(logits, temperature, top_k, top_p, uniform, sampled).start()
    return sampled


def sample_call(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    uniform: torch.Tensor,
    sampled: Sampled,
) -> KernelCall:
    arguments = {
        "logits": logits,
        "temperatures": temperature,
        "top_ks": top_k,
        "top_ps": top_p,
        "uniforms": uniform,
        "token_ids": sampled.token_ids,
        "logprobs": sampled.logprobs,
        "row_stride": logits.stride(0),
        "vocab": logits.shape[1],
        "BLOCK": SAMPLE_TOKENS,
        "PIVOTS": SAMPLE_PIVOTS,
    }
    return KernelCall(sample_row, (len(logits),), arguments, warps=8)


@triton.jit
def _keys(logits):
    """Integers in the order of float32 numbers; both zeros are one."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & _LARGEST_KEY)


@triton.jit
def _threshold(
    row, vocab, low, high, goal, highest, temperature, BY_MASS: tl.constexpr, BLOCK: tl.constexpr, PIVOTS: tl.constexpr
):
    """The largest key in `[low, high]` from which on the row has `goal`: so many tokens, or so much mass.

    From `low` on it has that.
    """
    steps = tl.arange(0, PIVOTS).to(tl.int64) + 1
    beyond = high.to(tl.int64) + 1  # from there on it has not
    found = low.to(tl.int64)
    while beyond - found > 1:
        pivots = found + (beyond - found) * steps // (PIVOTS + 1)
        pivot_keys = pivots.to(tl.int32)
        measures = tl.zeros([PIVOTS], tl.float32)
        least = tl.full([BLOCK], _LARGEST_KEY, tl.int32)
        most = tl.full([BLOCK], -_LARGEST_KEY, tl.int32)
        for begin in range(0, vocab, BLOCK):
            places = begin + tl.arange(0, BLOCK)
            logits = tl.load(row + places, mask=places < vocab, other=-_INFINITY)
            keys = tl.where(places < vocab, _keys(logits), -_LARGEST_KEY)
            weights = tl.exp((logits - highest) / temperature) if BY_MASS else tl.full([BLOCK], 1.0, tl.float32)
            measures += tl.sum(tl.where(keys[:, None] >= pivot_keys[None, :], weights[:, None], 0.0), 0)
            least = tl.where((keys >= found) & (places < vocab), tl.minimum(least, keys), least)
            most = tl.where(keys < beyond, tl.maximum(most, keys), most)
        # First to where there are logits at all, then to the pivots around the answer.
        smallest, largest = tl.min(least, 0).to(tl.int64), tl.max(most, 0).to(tl.int64)
        enough = measures >= goal
        found = tl.maximum(smallest, tl.max(tl.where(enough, pivots, smallest), 0))
        beyond = tl.minimum(largest + 1, tl.min(tl.where(enough, largest + 1, pivots), 0))
    return found.to(tl.int32)


@triton.jit
def sample_row(
    logits,
    temperatures,
    top_ks,
    top_ps,
    uniforms,
    token_ids,
    logprobs,
    row_stride,
    vocab,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * row_stride
    temperature = tl.load(temperatures + index)
    greedy = temperature == 0.0
    divisor = tl.where(greedy, 1.0, temperature)

    # Largest logit and its first place, and both sums of weights: of the model's distribution, and of the tempered one.
    lane_most = tl.full([BLOCK], -_INFINITY, tl.float32)
    lane_place = tl.zeros([BLOCK], tl.int32)
    lane_sum = tl.zeros([BLOCK], tl.float32)
    lane_tempered = tl.zeros([BLOCK], tl.float32)
    wrong = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, vocab, BLOCK):
        places = begin + tl.arange(0, BLOCK)
        found = tl.load(row + places, mask=places < vocab, other=-_INFINITY)
        wrong |= ((found != found) | (found == _INFINITY)).to(tl.int32)
        lane_place = tl.where(found > lane_most, places, lane_place)
        more = tl.maximum(lane_most, found)
        base = tl.where(more == -_INFINITY, 0.0, more)
        lane_sum = lane_sum * tl.exp(lane_most - base) + tl.exp(found - base)
        lane_tempered = lane_tempered * tl.exp((lane_most - base) / divisor) + tl.exp((found - base) / divisor)
        lane_most = more
    highest = tl.max(lane_most, 0)
    likeliest = tl.min(tl.where(lane_most == highest, lane_place, vocab), 0)
    total = tl.sum(lane_sum * tl.exp(lane_most - highest), 0)
    if (tl.max(wrong, 0) > 0) | (highest == -_INFINITY):
        tl.store(token_ids + index, 0)
        tl.store(logprobs + index, float("nan"))
        return
    if greedy:
        tl.store(token_ids + index, likeliest.to(tl.int64))
        tl.store(logprobs + index, -tl.log(total))
        return

    mass = tl.sum(lane_tempered * tl.exp((lane_most - highest) / divisor), 0)
    top_k, top_p = tl.load(top_ks + index).to(tl.int32), tl.load(top_ps + index)
    most_key = _keys(highest)
    threshold = tl.full([], -_LARGEST_KEY, tl.int32)
    if (top_k > 0) & (top_k < vocab):
        threshold = _threshold(
            row, vocab, threshold, most_key, top_k.to(tl.float32), highest, divisor, False, BLOCK, PIVOTS
        )
        mass, _, _ = _above(row, vocab, threshold - 1, highest, divisor, BLOCK)
    skipped = tl.full([], 0, tl.int32)  # of the tokens that tie with the threshold, those of the lowest ids
    if top_p < 1.0:
        goal = top_p * mass
        threshold = _threshold(row, vocab, threshold, most_key, goal, highest, divisor, True, BLOCK, PIVOTS)
        above, ties, weight = _above(row, vocab, threshold, highest, divisor, BLOCK)
        kept = tl.minimum(tl.maximum(tl.ceil((goal - above) / weight), 1.0), ties)
        mass = above + kept * weight
        skipped = (ties - kept).to(tl.int32)

    token = _pick(
        row, vocab, threshold, skipped, tl.load(uniforms + index).to(tl.float64) * mass, highest, divisor, BLOCK
    )
    tl.store(token_ids + index, token.to(tl.int64))
    tl.store(logprobs + index, tl.load(row + token) - highest - tl.log(total))


@triton.jit
def _above(row, vocab, threshold, highest, temperature, BLOCK: tl.constexpr):
    """Mass of what is above the threshold; how many tokens tie with it, and the weight of each."""
    mass, ties = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    weight = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, vocab, BLOCK):
        places = begin + tl.arange(0, BLOCK)
        logits = tl.load(row + places, mask=places < vocab, other=-_INFINITY)
        keys, weights = _keys(logits), tl.exp((logits - highest) / temperature)
        mass += tl.where(keys > threshold, weights, 0.0)
        tie = (keys == threshold) & (places < vocab)
        ties += tie.to(tl.float32)
        weight = tl.where(tie, weights, weight)
    return tl.sum(mass, 0), tl.sum(ties, 0), tl.max(weight, 0)


@triton.jit
def _pick(row, vocab, threshold, skipped, target, highest, temperature, BLOCK: tl.constexpr):
    """The first token, by id, at which the mass of what is kept passes `target`; else the last that is kept."""
    token = tl.full([], 0, tl.int32) + vocab
    last = tl.full([], 0, tl.int32)
    ties = tl.full([], 0, tl.int32)
    before = tl.full([], 0.0, tl.float64)
    begin = tl.full([], 0, tl.int32)
    while (begin < vocab) & (token == vocab):
        places = begin + tl.arange(0, BLOCK)
        logits = tl.load(row + places, mask=places < vocab, other=-_INFINITY)
        keys = _keys(logits)
        tie = ((keys == threshold) & (places < vocab)).to(tl.int32)
        rank = ties + tl.cumsum(tie, 0) - 1
        kept = (places < vocab) & ((keys > threshold) | ((tie == 1) & (rank >= skipped)))
        weights = tl.where(kept, tl.exp((logits - highest) / temperature), 0.0)
        passed = kept & (tl.cumsum(weights, 0) > (target - before).to(tl.float32))
        token = tl.min(tl.where(passed, places, vocab), 0)
        last = tl.maximum(last, tl.max(tl.where(kept & (weights > 0.0), places, 0), 0))
        ties += tl.sum(tie, 0)
        before += tl.sum(weights, 0).to(tl.float64)
        begin += BLOCK
    return tl.where(token == vocab, last, token)
