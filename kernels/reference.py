"""What every kernel must compute, in plain PyTorch. Contracts stand in the file of each operation; no checks here."""

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.to(torch.float32)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def store_kv(kv: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    block_tokens = kv.shape[3]
    blocks, offsets = slots // block_tokens, slots % block_tokens
    # The slice between two index tensors moves the indexed dimension to the front: [tokens, kv_heads, head_dim].
    kv[:, 0][blocks, :, offsets] = key
    kv[:, 1][blocks, :, offsets] = value


def copy_blocks(kv: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
    kv[destinations] = kv[sources]


def paged_prefill(
    query: torch.Tensor, kv: torch.Tensor, block_ids: torch.Tensor, start: int, scale: float, window: int | None
) -> torch.Tensor:
    kv_heads, block_tokens, head_dim = kv.shape[2:]
    end = start + query.shape[0]
    skipped_blocks = max(0, start - window + 1) // block_tokens if window is not None else 0
    first = skipped_blocks * block_tokens
    gathered = kv.index_select(0, block_ids[skipped_blocks:]).permute(1, 2, 0, 3, 4)
    keys, values = gathered.reshape(2, 1, kv_heads, -1, head_dim)[:, :, :, : end - first]
    asking = torch.arange(start, end, device=query.device)[:, None]
    position = torch.arange(first, end, device=query.device)[None, :]
    visible = position <= asking
    if window is not None:
        visible &= position > asking - window
    attended = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None], keys, values, attn_mask=visible, scale=scale, enable_gqa=True
    )
    return attended[0].transpose(0, 1)


def paged_decode(
    query: torch.Tensor,
    kv: torch.Tensor,
    block_ids: torch.Tensor,
    block_starts: torch.Tensor,
    context_tokens: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Each block attends by itself, then the blocks of a sequence are combined: nothing is padded."""
    sequences, heads, head_dim = query.shape
    kv_heads, block_tokens = kv.shape[2:4]
    owner = torch.arange(sequences, device=query.device).repeat_interleave(block_starts.diff())  # [used_blocks]
    visible = _visible(owner, block_starts, context_tokens, block_tokens, window)[:, None, None]

    # [used_blocks, kv_heads, block_tokens, head_dim]; gathered apart, or matmul would copy them once more
    keys, values = kv[:, 0].index_select(0, block_ids), kv[:, 1].index_select(0, block_ids)
    tails = block_starts[1:] - 1  # past the context a block may hold anything, and 0 * NaN is NaN
    values[tails] = values[tails].masked_fill(~visible[tails].transpose(-1, -2), 0)

    grouped = query.view(sequences, kv_heads, heads // kv_heads, head_dim)
    scores = (grouped[owner] @ keys.transpose(-1, -2)).float() * scale  # [used_blocks, kv_heads, group, block_tokens]
    scores = scores.masked_fill(~visible, -torch.inf)
    highest = torch.segment_reduce(scores.amax(-1), "max", lengths=block_starts.diff(), axis=0)
    weights = (scores - highest[owner].unsqueeze(-1)).exp()
    attended = (weights.to(values.dtype) @ values).float()
    total = torch.zeros_like(highest).index_add_(0, owner, weights.sum(-1)).unsqueeze(-1)
    result = grouped.new_zeros(grouped.shape, dtype=torch.float32).index_add_(0, owner, attended) / total
    return result.to(query.dtype).view(sequences, heads, head_dim)


def _visible(
    owner: torch.Tensor,
    block_starts: torch.Tensor,
    context_tokens: torch.Tensor,
    block_tokens: int,
    window: int | None,
) -> torch.Tensor:
    """Which tokens of each used block its owner's query sees: bool `[used_blocks, block_tokens]`."""
    logical = torch.arange(len(owner), device=owner.device) - block_starts[owner]
    position = logical[:, None] * block_tokens + torch.arange(block_tokens, device=owner.device)
    context = context_tokens[owner][:, None]
    visible = position < context
    return visible if window is None else visible & (position >= context - window)
