"""Reference implementation of every kernel in plain PyTorch. Contracts and checks are in the operations' own files."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from baton.kernels.packed_weight import GROUPED, PANEL, PackedExperts, PackedGated, PackedWeight, Stored, unpacked
from baton.kernels.types import (
    E2M1,
    MIN_WEIGHT_SUM,
    SWIGLU_ALPHA,
    SWIGLU_LIMIT,
    ZERO_PARTS,
    DecodeRows,
    DeltaRates,
    ExpertChoice,
    ExpertWeight,
    Gate,
    GatingFunction,
    HeadNorms,
    KvLayer,
    KvPages,
    QuantisedWeight,
    Routing,
    RowStatistics,
    Sampled,
    Scoring,
    SortedPairs,
    StateInit,
    StateRates,
    StateRuns,
    dequantise,
    quantise,
)

KEYS, VALUES = 0, 1
DELTA_TOKENS = 64  # maximum number of tokens of a run that the delta rule computes at a time
LENGTH_EPS = 1e-6


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.to(torch.float32)
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normal.to(weight.dtype) * weight).to(x.dtype)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return rms_norm(residual.add_(x), weight, eps)


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    angles = cos.shape[1]
    first, second, rest = x.split((angles, angles, x.shape[2] - 2 * angles), dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def gate_mul(gate_up: torch.Tensor, gate: Gate = Gate.SILU) -> torch.Tensor:
    gates, up = gate_up.chunk(2, dim=-1)
    if gate is Gate.CLAMPED:
        gates, up = gates.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        return gates * torch.sigmoid(gates * SWIGLU_ALPHA) * (up + 1)
    if gate is Gate.SIGMOID:
        return torch.sigmoid(gates) * up
    return (F.silu(gates) if gate is Gate.SILU else F.gelu(gates, approximate="tanh")) * up


def store_kv(kv: KvLayer, key: torch.Tensor, value: torch.Tensor | None, slots: torch.Tensor) -> None:
    if bool((slots < 0).any()):
        real = slots >= 0
        key, value, slots = key[real], None if value is None else value[real], slots[real]
    blocks, offsets = slots // kv.block_tokens, slots % kv.block_tokens
    # PyTorch puts the dimension of index tensors first if a slice is between them, so the assigned shape is
    # [tokens, kv_heads, head_dim].
    for part, numbers in enumerate((key,) if value is None else (key, value)):
        if kv.scales is not None:
            numbers, scales = quantise(numbers, kv.data.dtype)
            kv.scales[:, part][blocks, :, offsets] = scales
        kv.data[:, part][blocks, :, offsets] = numbers


def rotate_and_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norms: HeadNorms | None,
    kv: KvLayer,
    slots: torch.Tensor,
) -> torch.Tensor:
    heads = qkv.shape[1] - 2 * kv.kv_heads
    query, key, value = qkv.split((heads, kv.kv_heads, kv.kv_heads), dim=1)
    if norms is not None:
        query, key = rms_norm(query, norms.query, norms.eps), rms_norm(key, norms.key, norms.eps)
    key = rotary(key, cos, sin)
    if kv.scales is None:
        key, value = key.to(kv.data.dtype), value.to(kv.data.dtype)
    store_kv(kv, key, value, slots)
    return rotary(query, cos, sin)


def packed_linear(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    stored = unpacked(weight)
    if weight.stored is Stored.INT8 and weight.scales is not None and not weight.group_inputs:
        integers, scales = _integers(x)
        # Sums of integers are exact in float64. Results of rows with a non-finite value are replaced by NaN below.
        out = (integers.double() @ stored.double().T).float() * weight.scales[: weight.outputs] * scales
        out = out.masked_fill(~x.isfinite().all(1, keepdim=True), torch.nan)
    elif weight.group_inputs:
        groups, largest = x.unflatten(1, (-1, weight.group_inputs)), MOST_INTEGER if weight.zeros is None else 127
        integers, scales = _unsigned_bytes(groups) if weight.stored is Stored.INT8 else _rounded(groups, largest)
        out = ((integers.double() * scales).flatten(1) @ stored.double().T).float()
        if weight.stored is Stored.INT8 and weight.scales is not None:
            out *= weight.scales[: weight.outputs]
        out = out.masked_fill(~x.isfinite().all(1, keepdim=True), torch.nan)
    else:
        rounded = x.bfloat16().float() if weight.stored is Stored.ROUNDING else x
        out = rounded @ stored.float().T
    return out if weight.bias is None else out + weight.bias


def head_linear(x: torch.Tensor, weight: PackedWeight, heads: int) -> torch.Tensor:
    rounded = x.bfloat16().float() if weight.stored is Stored.ROUNDING else x
    return torch.einsum("rhi,hoi->rho", rounded, unpacked(weight).float().unflatten(0, (heads, -1)))


def _rounded(x: torch.Tensor, largest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise along the last dimension; return integers up to `largest`, and scales whose last dimension is 1."""
    scales = (x.abs().amax(-1, keepdim=True) / largest).clamp(min=torch.finfo(torch.float32).tiny)
    return (x / scales).round().clamp(-largest, largest), scales


def _unsigned_bytes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise along the last dimension to 256 steps between the least and the largest number and zero.

    Returns the steps less that of zero, and scales whose last dimension is 1.
    """
    least, most = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scales = ((most / 2 - least / 2) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return (x / scales).round(), scales


MOST_INTEGER = 32767
MOST_MAGNITUDES = (1 << 24) - (1 << 17)  # largest sum of a row's magnitudes, so that sums of products fit in 32 bits


def _integers(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows to integers of at most 16 bits; return them, and scales `[rows, 1]`."""
    integers, scales = _rounded(x, MOST_INTEGER)
    sums = integers.abs().sum(-1, dtype=torch.float64, keepdim=True)
    scales = scales * (sums / MOST_MAGNITUDES).clamp(min=1).float()
    return (x / scales).round(), scales


def choose_experts(numbers: torch.Tensor, routing: Routing, correction: torch.Tensor | None) -> ExpertChoice:
    odds = numbers.softmax(-1) if routing.odds is GatingFunction.SOFTMAX else sigmoid(numbers)
    judged = odds if correction is None else odds + correction
    if routing.groups > routing.kept_groups:
        judged = _in_best_groups(judged, routing)
    chosen = judged.topk(routing.per_token, dim=-1).indices
    weights = odds.gather(1, chosen)
    if routing.normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + MIN_WEIGHT_SUM)
    return ExpertChoice(weights if routing.scale == 1.0 else weights * routing.scale, chosen)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Return the sigmoid, computed as softmax of x and 0.

    PyTorch's own sigmoid rounds the last elements of a tensor differently from the others.
    """
    return torch.stack((x, torch.zeros_like(x)), dim=-1).softmax(-1)[..., 0]


def _in_best_groups(judged: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Return `judged` with `-inf` for the experts outside the best groups."""
    grouped = judged.unflatten(1, (routing.groups, -1))
    merits = grouped.topk(routing.judged_by, dim=-1).values.sum(-1)
    kept = merits.topk(routing.kept_groups, dim=-1).indices
    others = torch.ones_like(merits, dtype=torch.bool).scatter_(1, kept, False)
    kept_alone: torch.Tensor = grouped.masked_fill(others[:, :, None], -torch.inf).flatten(1)
    return kept_alone


def packed_experts(x: torch.Tensor, mixture: PackedExperts) -> torch.Tensor:
    weights, chosen = choose_experts(packed_linear(x, mixture.router), mixture.routing, mixture.correction)
    result = torch.zeros_like(x)
    for index in torch.unique(chosen).tolist():
        rows, places = torch.where(chosen == index)
        result.index_add_(0, rows, _packed_gated(x[rows], mixture.experts[index]) * weights[rows, places, None])
    if mixture.shared is None:
        return result
    shared = _packed_gated(x, mixture.shared)
    opened = shared if mixture.shared_gate is None else sigmoid(packed_linear(x, mixture.shared_gate)) * shared
    return result + opened


def _packed_gated(x: torch.Tensor, gated: PackedGated) -> torch.Tensor:
    inner = packed_linear(x, gated.gate_up)
    inner = inner.relu().square() if gated.gate is None else gate_mul(inner, gated.gate)
    return packed_linear(inner, gated.down)


def gather_rows(token_ids: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    if bool(((token_ids < 0) | (token_ids >= weight.outputs)).any()):
        raise IndexError(f"token id out of range; the weight has {weight.outputs} rows")
    if weight.stored in GROUPED:
        return unpacked(weight)[token_ids]
    words = weight.data[token_ids // PANEL, :, token_ids % PANEL]
    return words.flatten(1)[:, : weight.inputs].float()


def quantised_linear(x: torch.Tensor, weight: QuantisedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    sums = x.float() @ dequantise_weight(weight, torch.float32).T
    return (sums if bias is None else sums + bias.float()).to(x.dtype)


def fused_linear(
    x: torch.Tensor,
    weight: torch.Tensor | QuantisedWeight,
    bias: torch.Tensor | None,
    norm: torch.Tensor | None,
    eps: float,
    gate: Gate | None,
    out: torch.Tensor | None,
    adds: bool,
) -> torch.Tensor:
    inputs = x if norm is None else rms_norm(x, norm, eps)
    if isinstance(weight, torch.Tensor):
        made = F.linear(inputs, weight, bias)
    else:
        made = quantised_linear(inputs, weight, bias)
    made = made if gate is None else gate_mul(made, gate)
    if out is None:
        return made
    return out.add_(made) if adds else out.copy_(made)


def dequantise_weight(weight: QuantisedWeight, dtype: torch.dtype) -> torch.Tensor:
    if not weight.has_codes:
        return dequantise(weight.data, weight.scales, dtype)
    codes = torch.empty(weight.outputs, weight.inputs, device=weight.data.device)
    codes[:, : weight.inputs // 2] = weight.data & 15
    codes[:, weight.inputs // 2 :] = weight.data >> 4
    if weight.zeros is None:
        codes = torch.tensor(E2M1, device=codes.device)[codes.int()]
    groups = codes.unflatten(1, (weight.scales.shape[1], -1))
    if weight.zeros is not None:
        groups.sub_(weight.zeros[..., None] / ZERO_PARTS)
    groups.mul_(weight.scales[..., None])
    return codes.to(dtype)


def expert_linear(x: torch.Tensor, weight: ExpertWeight, pairs: SortedPairs) -> torch.Tensor:
    """Multiply the row of each pair by the dequantised weight of the pair's expert."""
    count = len(pairs.order)
    experts = torch.searchsorted(pairs.starts[1:], torch.arange(count, device=x.device), right=True)
    rows, plain = x[pairs.order // (count // len(x))].float(), weight.rows
    wide = plain.float() if isinstance(plain, torch.Tensor) else dequantise_weight(plain, torch.float32)
    products = wide.view(weight.experts, weight.outputs, -1)[experts] @ rows[:, :, None]
    out = x.new_empty(count, weight.outputs)
    out[pairs.order] = products[..., 0].to(x.dtype)
    return out


def gather_blocks(blocks: torch.Tensor, block_ids: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(blocks.index_select(0, block_ids))


def scatter_blocks(source: torch.Tensor, blocks: torch.Tensor, block_ids: torch.Tensor) -> None:
    blocks[block_ids] = source


def row_statistics(logits: torch.Tensor, allowed: Sequence[torch.Tensor | None] | None = None) -> RowStatistics:
    among = masked_rows(logits, range(len(logits)), allowed) if allowed else logits
    # A finite number minus itself is 0; otherwise the difference is NaN. This is several times faster than isfinite().
    return RowStatistics(among.argmax(-1), logits.logsumexp(-1), (logits - logits).sum(-1) == 0)


def masked_rows(logits: torch.Tensor, places: Sequence[int], allowed: Sequence[torch.Tensor | None]) -> torch.Tensor:
    taken = logits[list(places)]  # a copy, which may be overwritten
    size = logits.shape[-1]
    masked = [(row, bits) for row, bits in enumerate(allowed) if bits is not None]
    if masked:
        packed = torch.zeros(len(masked), -(-size // 8), dtype=torch.uint8)
        for row, (_, bits) in zip(packed, masked, strict=True):
            known = bits[: len(row)]
            row[: len(known)] = known
        ones = torch.arange(8, dtype=torch.uint8, device=logits.device)
        kept = (packed.to(logits.device)[:, :, None] >> ones & 1).flatten(1)[:, :size]
        rows = [row for row, _ in masked]
        taken[rows] = taken[rows].masked_fill_(kept == 0, -torch.inf)
    return taken


def sample_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    uniform: torch.Tensor,
    may_ban: bool,
    out: Sampled,
) -> None:
    """Sample one token per row, in float64, one row after another."""
    out.token_ids.zero_()
    out.logprobs.fill_(torch.nan)
    for index, row in enumerate(logits.double()):
        if bool(row.max().isfinite()) and (may_ban or bool(row.min().isfinite())):
            out.token_ids[index] = _sample(row, *(float(each[index]) for each in (temperature, top_k, top_p, uniform)))
            out.logprobs[index] = row.log_softmax(0)[out.token_ids[index]]


def _sample(row: torch.Tensor, temperature: float, top_k: float, top_p: float, uniform: float) -> torch.Tensor:
    if temperature == 0:
        return row.argmax()
    if 0 < top_k < len(row):
        row = row.masked_fill(row < row.topk(int(top_k)).values[-1], -torch.inf)
    weights = ((row - row.max()) / temperature).exp()
    if top_p < 1:
        ascending = row.sort(stable=True).indices
        below = weights[ascending].cumsum(0)
        dropped = below <= (1 - top_p) * below[-1]
        dropped[-1] = False
        weights[ascending[dropped]] = 0
    shares = weights.cumsum(0)
    found = torch.searchsorted(shares, uniform * shares[-1:], right=True)[0]
    return found.minimum(weights.nonzero()[-1, 0])  # the product may round up to the total


def copy_blocks(kv: KvPages, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    # Use index_select(), since older PyTorch cannot index 8-bit floats.
    for part in (kv.data, kv.scales):
        if part is not None:
            part[destinations] = part.index_select(0, sources)


def paged_prefill(
    query: torch.Tensor, kv: KvLayer, block_ids: torch.Tensor, start: int, scoring: Scoring
) -> torch.Tensor:
    kv_heads, block_tokens = kv.kv_heads, kv.block_tokens
    end = start + query.shape[0]
    skipped_blocks = max(0, start - scoring.window + 1) // block_tokens if scoring.window is not None else 0
    first = skipped_blocks * block_tokens
    keys, values = (
        read(kv, part, block_ids[skipped_blocks:], query.dtype).transpose(0, 1).flatten(1, 2)[None, :, : end - first]
        for part in (KEYS, VALUES)
    )
    asking = torch.arange(start, end, device=query.device)[:, None]
    distance = torch.arange(first, end, device=query.device)[None, :] - asking  # 0: the key is the query's token
    visible = distance <= 0
    if scoring.window is not None:
        visible &= distance > -scoring.window
    if scoring.is_plain:
        plain = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None], keys, values, attn_mask=visible, scale=scoring.scale, enable_gqa=True
        )
        return plain[0].transpose(0, 1)
    grouped = query.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)  # [kv_heads, group, tokens, head_dim]
    scores = soft_capped((grouped @ keys[0, :, None].transpose(-1, -2)).float() * scoring.scale, scoring.softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    if scoring.sinks is not None:
        scores = torch.cat((scores, scoring.sinks.view(kv_heads, -1, 1, 1).expand(-1, -1, len(query), 1)), dim=-1)
    weights = scores.softmax(-1)[..., : end - first].to(values.dtype)
    attended = weights @ values[0, :, None]
    return attended.permute(2, 0, 1, 3).flatten(1, 2)


def paged_decode(query: torch.Tensor, kv: KvLayer, rows: DecodeRows, scoring: Scoring) -> torch.Tensor:
    """Compute attention of each used block, then combine the results per sequence. This needs no padding."""
    sequences, heads, head_dim = query.shape
    kv_heads, block_tokens = kv.kv_heads, kv.block_tokens
    context_tokens, first = rows.context_tokens, int(rows.block_starts[0])
    block_ids, block_starts = rows.block_ids[first : int(rows.block_starts[-1])], rows.block_starts - first
    if not len(block_ids):
        return query.new_zeros(sequences, heads, kv.value_dim)
    owner = torch.arange(sequences, device=query.device).repeat_interleave(block_starts.diff())  # [used_blocks]
    distance = _distance(owner, block_starts, context_tokens, block_tokens)[:, None, None]
    visible = distance <= 0
    if scoring.window is not None:
        visible &= distance > -scoring.window

    # [used_blocks, kv_heads, block_tokens, head_dim]. Keys and values are read into two tensors, because matmul would
    # copy slices of a common tensor again.
    keys, values = read(kv, KEYS, block_ids, query.dtype), read(kv, VALUES, block_ids, query.dtype)
    tails = block_starts[1:][context_tokens > 0] - 1  # unused slots of last blocks may contain NaN, and 0 * NaN is NaN
    values[tails] = values[tails].masked_fill(~visible[tails].transpose(-1, -2), 0)

    grouped = query.view(sequences, kv_heads, heads // kv_heads, head_dim)
    scores = (grouped[owner] @ keys.transpose(-1, -2)).float() * scoring.scale  # [used_blocks, kv_heads, group, tokens]
    scores = soft_capped(scores, scoring.softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    highest = torch.segment_reduce(scores.amax(-1), "max", lengths=block_starts.diff(), axis=0)
    sinks = None if scoring.sinks is None else scoring.sinks.view(kv_heads, -1)
    if sinks is not None:
        highest = highest.maximum(sinks)
    weights = (scores - highest[owner].unsqueeze(-1)).exp()
    attended = (weights.to(values.dtype) @ values).float()
    total = torch.zeros_like(highest) if sinks is None else (sinks - highest).exp()
    total = total.index_add_(0, owner, weights.sum(-1)).unsqueeze(-1)
    total.masked_fill_((context_tokens == 0)[:, None, None, None], 1)
    sums = grouped.new_zeros(*grouped.shape[:3], kv.value_dim, dtype=torch.float32).index_add_(0, owner, attended)
    return (sums / total).to(query.dtype).view(sequences, heads, kv.value_dim)


def read(kv: KvLayer, part: int, block_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return KEYS or VALUES of `block_ids` in `dtype`: a new `[used_blocks, kv_heads, block_tokens, size]`."""
    kind, size = (part, kv.head_dim) if kv.value_prefix is None or part == KEYS else (KEYS, kv.value_prefix)
    stored = kv.data[:, kind, :, :, :size].index_select(0, block_ids)
    if kv.scales is None:
        return stored
    return dequantise(stored, kv.scales[:, kind].index_select(0, block_ids), dtype)


def soft_capped(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Map scores to `(-softcap, softcap)`, with the same signs and order. `softcap` None: return scores unchanged."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def _distance(
    owner: torch.Tensor, block_starts: torch.Tensor, context_tokens: torch.Tensor, block_tokens: int
) -> torch.Tensor:
    """Return, for each slot of a used block, its position minus that of the query: `[used_blocks, block_tokens]`."""
    logical = torch.arange(len(owner), device=owner.device) - block_starts[owner]
    position = logical[:, None] * block_tokens + torch.arange(block_tokens, device=owner.device)
    return position - (context_tokens[owner] - 1)[:, None]


def causal_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    states: torch.Tensor,
    runs: StateRuns,
    bias: torch.Tensor | None = None,
    activates: bool = True,
) -> torch.Tensor:
    wide, weights, alone = x.float(), weight.float().T, runs.alone  # weights: [kernel, channels]
    kernel, outs = len(weights), []
    if alone:
        before = _begun(states, runs, slice(0, alone))
        is_again = (runs.begins[:alone] == StateInit.AGAIN)[:, None, None]
        after = torch.where(is_again, before, torch.cat((before[:, 1:], wide[:alone, None]), dim=1))
        states[runs.destinations[:alone]] = after
        outs.append(_weighted([after[:, tap] for tap in range(kernel)], weights))
    first = alone
    for number, rows in enumerate(runs.rows, start=alone):
        one = slice(number, number + 1)
        seen = torch.cat((_begun(states, runs, one)[0], wide[first : first + rows]))
        states[runs.destinations[one]] = seen[None, rows:]
        outs.append(_weighted([seen[tap + 1 : tap + 1 + rows] for tap in range(kernel)], weights))
        first += rows
    made = torch.cat(outs)
    made = (made if bias is None else made + bias.float()).to(x.dtype)
    return F.silu(made) if activates else made


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    rates: DeltaRates,
    states: torch.Tensor,
    runs: StateRuns,
) -> torch.Tensor:
    together, alone = value.shape[1] // key.shape[1], runs.alone
    decay, beta = rates.rate * F.softplus(decay.float() + rates.bias), beta.sigmoid().float()
    query, key = (_of_length_one(each).repeat_interleave(together, dim=1) for each in (query, key))
    query, wide = query * key.shape[2] ** -0.5, value.float()
    out = torch.empty_like(wide)
    if alone:
        before = _begun(states, runs, slice(0, alone))
        decayed, keys = before * decay[:alone, :, None, None].exp(), key[:alone, :, :, None]
        change = (wide[:alone, :, None] - keys.mT @ decayed) * beta[:alone, :, None, None]
        is_again = (runs.begins[:alone] == StateInit.AGAIN)[:, None, None, None]
        after = torch.where(is_again, before, decayed + keys * change)
        states[runs.destinations[:alone]] = after
        out[:alone] = (query[:alone, :, None] @ after)[:, :, 0]
    first = alone
    for number, rows in enumerate(runs.rows, start=alone):
        one, own = slice(number, number + 1), slice(first, first + rows)
        state = _begun(states, runs, one)[0]
        for piece in range(first, first + rows, DELTA_TOKENS):
            some = slice(piece, min(piece + DELTA_TOKENS, own.stop))
            queries, keys, values, decays, betas = (
                each[some].transpose(0, 1) for each in (query, key, wide, decay, beta)
            )
            made, state = _delta_piece(queries, keys, values, decays, betas, state)
            out[some] = made.transpose(0, 1)
        states[runs.destinations[one]] = state[None]
        first += rows
    return out


def state_space_scan(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    steps: torch.Tensor,
    rates: StateRates,
    states: torch.Tensor,
    runs: StateRuns,
) -> torch.Tensor:
    together, alone, wide = value.shape[1] // key.shape[1], runs.alone, value.float()
    step = F.softplus(steps.float() + rates.bias).clamp(rates.least_step, rates.most_step)
    decay, change = rates.rate * step, wide * step[:, :, None]
    query, key = (each.float().repeat_interleave(together, dim=1) for each in (query, key))
    out = wide * rates.skip[:, None]
    if alone:
        before, keys = _begun(states, runs, slice(0, alone)), key[:alone, :, :, None]
        is_again = (runs.begins[:alone] == StateInit.AGAIN)[:, None, None, None]
        decayed = before * decay[:alone, :, None, None].exp()
        after = torch.where(is_again, before, decayed + keys * change[:alone, :, None])
        states[runs.destinations[:alone]] = after
        out[:alone] += (query[:alone, :, None] @ after)[:, :, 0]
    first = alone
    for number, rows in enumerate(runs.rows, start=alone):
        one, own = slice(number, number + 1), slice(first, first + rows)
        state = _begun(states, runs, one)[0]
        for piece in range(first, first + rows, DELTA_TOKENS):
            some = slice(piece, min(piece + DELTA_TOKENS, own.stop))
            queries, keys, changes, decays = (each[some].transpose(0, 1) for each in (query, key, change, decay))
            total, between = _decays(decays)
            from_before = queries * total.exp()[:, :, None] @ state
            out[some] += (from_before + (queries @ keys.mT) * between @ changes).transpose(0, 1)
            left = (total[:, -1:] - total).exp()[:, :, None]
            state = state * total[:, -1].exp()[:, None, None] + (keys * left).mT @ changes
        states[runs.destinations[one]] = state[None]
        first += rows
    return out


def _decays(decay: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of decays up to each token, and the factor of decay between each pair of tokens; 0 for later ones.

    decay: `[heads, tokens]`.
    """
    total = decay.cumsum(1)
    later = torch.ones(decay.shape[1], decay.shape[1], dtype=torch.bool, device=decay.device).triu(1)
    return total, (total[:, :, None] - total[:, None]).masked_fill(later, -torch.inf).exp()


def _weighted(inputs: Sequence[torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of `inputs`. The order of additions does not depend on the number of rows."""
    total = inputs[0] * weights[0]
    for each, weight in zip(inputs[1:], weights[1:], strict=True):
        total = total + each * weight
    return total


def _delta_piece(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the delta rule for all tokens of `[heads, tokens, ...]` together; return results and the new state.

    Solves a triangular system (arXiv:2412.06464, section 3.3).
    """
    total, between = _decays(decay)
    own = key * beta[:, :, None]
    system = (own @ key.mT) * between
    known = own * total.exp()[:, :, None] @ state
    changes = torch.linalg.solve_triangular(system, value * beta[:, :, None] - known, upper=False, unitriangular=True)
    out = (query * total.exp()[:, :, None]) @ state + (query @ key.mT) * between @ changes
    left = (total[:, -1:] - total).exp()[:, :, None]
    return out, state * total[:, -1].exp()[:, None, None] + (key * left).mT @ changes


def _of_length_one(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + LENGTH_EPS)


def _begun(states: torch.Tensor, runs: StateRuns, some: slice) -> torch.Tensor:
    """Return the initial states of the runs `some`, as a copy."""
    shape = (-1, *[1] * (states.dim() - 1))
    begins = runs.begins[some].view(shape)
    stored = states.index_select(0, runs.sources[some])
    stored = stored.masked_fill(begins == StateInit.ZERO, 0.0)
    return stored.masked_fill(begins == StateInit.BROKEN, torch.nan)
