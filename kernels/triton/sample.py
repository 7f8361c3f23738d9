"""Sampling without sorting: kernels/sampling.py on a GPU.

One program per part of a row finds the part's largest logit and the sums of its weights. Then one program per row
samples. In a row without filters, the sums show which part contains the sampled token, and only this part is read
again.

Both filters, top_k and top_p, are thresholds on logits. Results of the parts give a lower bound of the threshold.
Tokens above the bound are copied first, unless there are too many, as in a flat distribution. To find a threshold, each
pass over the tokens tries PIVOTS values. The next pass searches between the two values around the threshold, or between
the smallest and largest logit in this interval. Logits are compared as integers of the same order, so that the search
ends and is exact.
"""

import torch
import triton
import triton.language as tl

from baton.kernels.triton.launch import (
    SAMPLE_COPIED_TOKENS,
    SAMPLE_FILTERED_TOKENS,
    SAMPLE_KEPT,
    SAMPLE_PARTS,
    SAMPLE_PIVOTS,
    SAMPLE_REGISTERS,
    SAMPLE_TOKENS,
    KernelCall,
)
from baton.kernels.types import Sampled

_INFINITY = tl.constexpr(float("inf"))
_LARGEST_KEY = tl.constexpr(0x7FFFFFFF)
_MARGIN = tl.constexpr(1e-3)  # subtracted from a logarithmic bound; larger than the bound's rounding error


def sample_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    uniform: torch.Tensor,
    may_ban: bool,
    out: Sampled,
) -> None:
    for call in sample_calls(logits, temperature, top_k, top_p, uniform, may_ban, out):
        call.start()


def sample_calls(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    uniform: torch.Tensor,
    may_ban: bool,
    out: Sampled,
) -> list[KernelCall]:
    """Return the call for the parts of rows, then the call that samples."""
    rows, vocab = logits.shape
    parts = -(-vocab // SAMPLE_TOKENS)
    sums = logits.new_empty(3, rows, parts, dtype=torch.float32)
    places = logits.new_empty(rows, parts, dtype=torch.int32)
    of_parts = {
        "logits": logits,
        "temperatures": temperature,
        "highests": sums[0],
        "totals": sums[1],
        "masses": sums[2],
        "places": places,
        "row_stride": logits.stride(0),
        "vocab": vocab,
        "parts": parts,
        "TOKENS": SAMPLE_TOKENS,
    }
    of_rows = of_parts | {
        "top_ks": top_k,
        "top_ps": top_p,
        "uniforms": uniform,
        "token_ids": out.token_ids,
        "logprobs": out.logprobs,
        "kept": logits.new_empty(rows, SAMPLE_KEPT),
        "kept_places": logits.new_empty(rows, SAMPLE_KEPT, dtype=torch.int32),
        "PARTS": SAMPLE_PARTS,
        "KEPT": SAMPLE_KEPT,
        "COPIED": SAMPLE_COPIED_TOKENS,
        "BLOCK": SAMPLE_FILTERED_TOKENS,
        "PIVOTS": SAMPLE_PIVOTS,
    }
    survey = KernelCall(survey_part, (rows, parts), of_parts | {"MAY_BAN": may_ban}, warps=4)
    return [survey, KernelCall(draw_row, (rows,), of_rows, warps=8, most_registers=SAMPLE_REGISTERS)]


@triton.jit
def _keys(logits):
    """Return integers in the order of the float32 numbers `logits`. Both zeros have the same integer."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & _LARGEST_KEY)


@triton.jit
def _logits(row, kept, is_whole, places, size):
    """Load logits at indices `places` of a row if `is_whole`, else of the row's copied tokens; -inf from `size` on."""
    of_row = tl.load(row + places, mask=(places < size) & (is_whole == 1), other=-_INFINITY)
    of_kept = tl.load(kept + places, mask=(places < size) & (is_whole == 0), other=-_INFINITY)
    return tl.where(is_whole == 1, of_row, of_kept).to(tl.float32)


@triton.jit
def _reached_by(highests, parts, count, PARTS: tl.constexpr):
    """Return the `count`-th largest of the parts' maxima, or -inf: at least `count` tokens have this logit or more."""
    numbers = tl.arange(0, PARTS)
    mosts = tl.load(highests + numbers, mask=numbers < parts, other=-_INFINITY)
    others, other_numbers = mosts[None, :], numbers[None, :]
    is_before = (others > mosts[:, None]) | ((others == mosts[:, None]) & (other_numbers < numbers[:, None]))
    return tl.max(tl.where(tl.sum(is_before.to(tl.int32), 1) == count - 1, mosts, -_INFINITY), 0)


@triton.jit
def _copied(row, vocab, low, kept, kept_places, KEPT: tl.constexpr, BLOCK: tl.constexpr):
    """Copy the tokens whose key is at least `low`, in order; return their number. If above KEPT, some are missing."""
    count, begin = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    while (begin < vocab) & (count <= KEPT):
        places = begin + tl.arange(0, BLOCK)
        logits = tl.load(row + places, mask=places < vocab, other=-_INFINITY)
        chosen = ((places < vocab) & (_keys(logits.to(tl.float32)) >= low)).to(tl.int32)
        targets = count + tl.cumsum(chosen, 0) - 1
        fits = (chosen == 1) & (targets < KEPT)
        tl.store(kept + targets, logits, mask=fits)
        tl.store(kept_places + targets, places, mask=fits)
        count += tl.sum(chosen, 0)
        begin += BLOCK
    tl.debug_barrier()  # other threads will read the copied tokens
    return count


@triton.jit
def _threshold(
    row,
    kept,
    is_whole,
    size,
    low,
    high,
    goal,
    highest,
    temperature,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    """Return the largest key in `[low, high]` such that tokens with this or a larger key measure at least `goal`.

    The measure is the sum of the tokens' weights if BY_MASS, else their number. The caller guarantees that `low`
    satisfies the condition.
    """
    steps = tl.arange(0, PIVOTS).to(tl.int64) + 1
    beyond = high.to(tl.int64) + 1  # smallest key whose measure is known to be less than `goal`
    found = low.to(tl.int64)
    while beyond - found > 1:
        pivots = found + (beyond - found) * steps // (PIVOTS + 1)
        pivot_keys = pivots.to(tl.int32)
        # Each thread sums over its own tokens. The sums of all threads are added once per pass.
        measures = tl.zeros([BLOCK, PIVOTS], tl.float32)
        least = tl.full([BLOCK], _LARGEST_KEY, tl.int32)
        most = tl.full([BLOCK], -_LARGEST_KEY, tl.int32)
        for begin in range(0, size, BLOCK):
            places = begin + tl.arange(0, BLOCK)
            logits = _logits(row, kept, is_whole, places, size)
            keys = tl.where(places < size, _keys(logits), -_LARGEST_KEY)
            weights = tl.exp((logits - highest) / temperature) if BY_MASS else tl.full([BLOCK], 1.0, tl.float32)
            measures += tl.where(keys[:, None] >= pivot_keys[None, :], weights[:, None], 0.0)
            least = tl.where((keys >= found) & (places < size), tl.minimum(least, keys), least)
            most = tl.where(keys < beyond, tl.maximum(most, keys), most)
        # Narrow the interval to the logits that occur in it, and to the two pivots around the threshold.
        smallest, largest = tl.min(least, 0).to(tl.int64), tl.max(most, 0).to(tl.int64)
        enough = tl.sum(measures, 0) >= goal
        found = tl.maximum(smallest, tl.max(tl.where(enough, pivots, smallest), 0))
        beyond = tl.minimum(largest + 1, tl.min(tl.where(enough, largest + 1, pivots), 0))
    return found.to(tl.int32)


# Do not specialise on the alignment of these arguments: they are slices of one tensor, at offsets that depend on the
# number of rows.
@triton.jit(do_not_specialize_on_alignment=["highests", "totals", "masses"])
def survey_part(
    logits,
    temperatures,
    highests,
    totals,
    masses,
    places,
    row_stride,
    vocab,
    parts,
    TOKENS: tl.constexpr,
    MAY_BAN: tl.constexpr,
):
    """Store a part's largest logit, the first token with this logit, and two sums of weights relative to this logit.

    `totals` are sums without temperature, `masses` sums with temperature. The largest logit is NaN if the part has an
    invalid logit.
    """
    index, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + index)
    divisor = tl.where(temperature == 0.0, 1.0, temperature)
    tokens = part * TOKENS + tl.arange(0, TOKENS)
    inside = tokens < vocab
    found = tl.load(logits + index * row_stride + tokens, mask=inside, other=-_INFINITY).to(tl.float32)
    highest = tl.max(found, 0)
    base = tl.where(highest == -_INFINITY, 0.0, highest)
    wrong = (found != found) | (found == _INFINITY)
    if not MAY_BAN:
        wrong |= inside & (found == -_INFINITY)
    place = tl.min(tl.where(found == highest, tokens, vocab), 0)
    target = index * parts + part
    tl.store(highests + target, tl.where(tl.max(wrong.to(tl.int32), 0) > 0, float("nan"), highest))
    tl.store(totals + target, tl.sum(tl.exp(found - base), 0))
    tl.store(masses + target, tl.sum(tl.exp((found - base) / divisor), 0))
    tl.store(places + target, place)


@triton.jit
def _part_masses(highests, masses, first, parts, highest, divisor, PARTS: tl.constexpr):
    """Return the masses of up to PARTS parts of a row from part `first` on, relative to the row's largest logit."""
    numbers = first + tl.arange(0, PARTS)
    mosts = tl.load(highests + numbers, mask=numbers < parts, other=-_INFINITY)
    found = tl.load(masses + numbers, mask=numbers < parts, other=0.0)
    return found * tl.exp((mosts - highest) / divisor)


@triton.jit
def _highest(highests, parts, PARTS: tl.constexpr):
    """Return the largest logit of a row, and whether the row has an invalid logit."""
    lane_most = tl.full([PARTS], -_INFINITY, tl.float32)
    wrong = tl.zeros([PARTS], tl.int32)
    for first in range(0, parts, PARTS):
        numbers = first + tl.arange(0, PARTS)
        mosts = tl.load(highests + numbers, mask=numbers < parts, other=-_INFINITY)
        wrong |= (mosts != mosts).to(tl.int32)
        lane_most = tl.maximum(lane_most, mosts)
    return tl.max(lane_most, 0), tl.max(wrong, 0) > 0


@triton.jit
def _summed(highests, totals, masses, places, parts, vocab, highest, divisor, PARTS: tl.constexpr):
    """Return both sums of weights of a row, relative to its largest logit, and the first token with this logit."""
    lane_total, lane_mass = tl.zeros([PARTS], tl.float32), tl.zeros([PARTS], tl.float32)
    lane_place = tl.zeros([PARTS], tl.int32) + vocab
    for first in range(0, parts, PARTS):
        numbers = first + tl.arange(0, PARTS)
        mosts = tl.load(highests + numbers, mask=numbers < parts, other=-_INFINITY)
        found = tl.load(totals + numbers, mask=numbers < parts, other=0.0)
        lane_total += found * tl.exp(mosts - highest)
        lane_mass += _part_masses(highests, masses, first, parts, highest, divisor, PARTS)
        found_places = tl.load(places + numbers, mask=(numbers < parts) & (mosts == highest), other=vocab)
        lane_place = tl.minimum(lane_place, found_places)
    return tl.sum(lane_total, 0), tl.sum(lane_mass, 0), tl.min(lane_place, 0)


@triton.jit(do_not_specialize_on_alignment=["highests", "totals", "masses"])
def draw_row(
    logits,
    temperatures,
    highests,
    totals,
    masses,
    places,
    row_stride,
    vocab,
    parts,
    top_ks,
    top_ps,
    uniforms,
    token_ids,
    logprobs,
    kept,
    kept_places,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    KEPT: tl.constexpr,
    COPIED: tl.constexpr,
    BLOCK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * row_stride
    highests, totals = highests + index * parts, totals + index * parts
    masses, places = masses + index * parts, places + index * parts
    temperature = tl.load(temperatures + index)
    greedy = temperature == 0.0
    divisor = tl.where(greedy, 1.0, temperature)

    highest, is_wrong = _highest(highests, parts, PARTS)
    if is_wrong | (highest == -_INFINITY):
        tl.store(token_ids + index, 0)
        tl.store(logprobs + index, float("nan"))
        return
    total, mass, likeliest = _summed(highests, totals, masses, places, parts, vocab, highest, divisor, PARTS)
    if greedy:
        tl.store(token_ids + index, likeliest.to(tl.int64))
        tl.store(logprobs + index, -tl.log(total))
        return

    top_k, top_p = tl.load(top_ks + index).to(tl.int32), tl.load(top_ps + index)
    threshold = tl.full([], -_LARGEST_KEY, tl.int32)
    ranked = (top_k > 0) & (top_k < vocab)
    is_whole, size = tl.full([], 1, tl.int32), tl.full([], 0, tl.int32) + vocab
    kept, kept_places = kept + index * KEPT, kept_places + index * KEPT
    if ranked | (top_p < 1.0):
        # Lower bound of the threshold: even a complete vocabulary of logits below it would have less mass than top_p
        # drops.
        low = highest + divisor * (tl.log((1.0 - top_p) * mass / vocab) - _MARGIN)
        if ranked:
            low = _reached_by(highests, parts, top_k, PARTS)
        threshold = tl.maximum(threshold, _keys(low))
        count = _copied(row, vocab, threshold, kept, kept_places, KEPT, COPIED)
        if count <= KEPT:
            is_whole = tl.full([], 0, tl.int32)
            size = count
    most_key = _keys(highest)
    if ranked:
        goal = top_k.to(tl.float32)
        threshold = _threshold(
            row, kept, is_whole, size, threshold, most_key, goal, highest, divisor, False, BLOCK, PIVOTS
        )
        mass, _, _ = _above(row, kept, is_whole, size, threshold - 1, highest, divisor, BLOCK)
    skipped = tl.full([], 0, tl.int32)  # number of left out tokens at the threshold, those of lowest ids
    if top_p < 1.0:
        goal = top_p * mass
        threshold = _threshold(
            row, kept, is_whole, size, threshold, most_key, goal, highest, divisor, True, BLOCK, PIVOTS
        )
        above, ties, weight = _above(row, kept, is_whole, size, threshold, highest, divisor, BLOCK)
        needed = tl.minimum(tl.maximum(tl.ceil((goal - above) / weight), 1.0), ties)
        mass = above + needed * weight
        skipped = (ties - needed).to(tl.int32)

    target = tl.load(uniforms + index).to(tl.float64) * mass
    begin, before = tl.full([], 0, tl.int32), tl.full([], 0.0, tl.float64)
    if not (ranked | (top_p < 1.0)):
        begin, before = _part_of(highests, masses, parts, target, highest, divisor, TOKENS, PARTS)
    token = _pick(row, kept, is_whole, size, begin, before, threshold, skipped, target, highest, divisor, BLOCK)
    if is_whole == 0:
        token = tl.load(kept_places + token)
    tl.store(token_ids + index, token.to(tl.int64))
    tl.store(logprobs + index, tl.load(row + token).to(tl.float32) - highest - tl.log(total))


@triton.jit
def _part_of(highests, masses, parts, target, highest, divisor, TOKENS: tl.constexpr, PARTS: tl.constexpr):
    """Return the first token of the part in which the cumulative mass exceeds `target`, and the mass before that part.

    Because of rounding, the mass of all parts may be slightly less than `target`. In this case return the last part
    with mass, and -inf as the mass before this part, so that its last token is sampled.
    """
    part = tl.full([], 0, tl.int32) + parts
    last = tl.full([], 0, tl.int32)
    before = tl.full([], 0.0, tl.float64)
    first = tl.full([], 0, tl.int32)
    while (first < parts) & (part == parts):
        numbers = first + tl.arange(0, PARTS)
        found = _part_masses(highests, masses, first, parts, highest, divisor, PARTS).to(tl.float64)
        passed = (numbers < parts) & (before + tl.cumsum(found, 0) > target)
        part = tl.min(tl.where(passed, numbers, parts), 0)
        last = tl.maximum(last, tl.max(tl.where(found > 0.0, numbers, 0), 0))
        before += tl.sum(tl.where(numbers < part, found, 0.0), 0)
        first += PARTS
    is_short = part == parts
    return tl.where(is_short, last, part) * TOKENS, tl.where(is_short, -_INFINITY, before)


@triton.jit
def _above(row, kept, is_whole, size, threshold, highest, temperature, BLOCK: tl.constexpr):
    """Return the mass of tokens above the threshold, the number of tokens at the threshold, and the weight of each."""
    mass, ties = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    weight = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, size, BLOCK):
        places = begin + tl.arange(0, BLOCK)
        logits = _logits(row, kept, is_whole, places, size)
        keys, weights = _keys(logits), tl.exp((logits - highest) / temperature)
        mass += tl.where(keys > threshold, weights, 0.0)
        tie = (keys == threshold) & (places < size)
        ties += tie.to(tl.float32)
        weight = tl.where(tie, weights, weight)
    return tl.sum(mass, 0), tl.sum(ties, 0), tl.max(weight, 0)


@triton.jit
def _pick(
    row, kept, is_whole, size, begin, before, threshold, skipped, target, highest, temperature, BLOCK: tl.constexpr
):
    """Return the first token, in order of ids, at which the cumulative weight of kept tokens exceeds `target`.

    If there is none, return the last kept token. The sum starts at token `begin` with the value `before`.
    """
    token = tl.full([], 0, tl.int32) + size
    last = tl.full([], 0, tl.int32)
    ties = tl.full([], 0, tl.int32)
    while (begin < size) & (token == size):
        places = begin + tl.arange(0, BLOCK)
        logits = _logits(row, kept, is_whole, places, size)
        keys = _keys(logits)
        tie = ((keys == threshold) & (places < size)).to(tl.int32)
        rank = ties + tl.cumsum(tie, 0) - 1
        stays = (places < size) & ((keys > threshold) | ((tie == 1) & (rank >= skipped)))
        weights = tl.where(stays, tl.exp((logits - highest) / temperature), 0.0)
        passed = stays & (weights > 0.0) & (tl.cumsum(weights, 0) > (target - before).to(tl.float32))
        token = tl.min(tl.where(passed, places, size), 0)
        last = tl.maximum(last, tl.max(tl.where(stays & (weights > 0.0), places, 0), 0))
        ties += tl.sum(tie, 0)
        before += tl.sum(weights, 0).to(tl.float64)
        begin += BLOCK
    return tl.where(token == size, last, token)
