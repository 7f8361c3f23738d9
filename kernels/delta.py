"""Layers with a recurrent state per sequence instead of keys and values: gated delta nets and state spaces.

A state is stored in the pool, in the block of the last token that it covers. A run is consecutive rows of one
sequence. It starts from the state in a source block and writes the new state to a destination block, which may be the
same block.
"""

import torch

from baton.kernels import reference
from baton.kernels.dispatch import pick
from baton.kernels.types import DeltaRates, StateRates, StateRuns, check_dtype, check_index, check_shape


def causal_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    states: torch.Tensor,
    runs: StateRuns,
    bias: torch.Tensor | None = None,
    activates: bool = True,
) -> torch.Tensor:
    """Compute a weighted sum of each channel's last `kernel` inputs, plus the bias; returns a tensor like `x`.

    x: `[tokens, channels]`; weight: `[channels, kernel]` in the dtype of `x`, the weight of the current input last;
    bias: `[channels]` in the dtype of `x`; activates: apply SiLU to the sum; states: float32 `[blocks, kernel,
    channels]`, the last inputs of each channel, newest last. Writes the new state of each of `runs`. Results are
    rounded to the dtype of `x` once, either before or after SiLU.
    """
    check_shape("x", x, None, None)
    check_shape("weight", weight, x.shape[1], None)
    check_dtype("weight", weight, x.dtype)
    if bias is not None:
        check_shape("bias", bias, x.shape[1])
        check_dtype("bias", bias, x.dtype)
    check_shape("states", states, None, weight.shape[1], x.shape[1])
    _check_runs(runs, states)
    return pick(reference.causal_convolution, x)(x, weight, states, runs, bias, activates)


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
    """Compute, token by token, `S = e^decay S; S += key (beta (value - key S)); out = query S` (arXiv:2412.06464).

    Returns `out` of all tokens: float32, of the shape of `value`. Arguments have any float dtype. First, `decay` is
    replaced by `rate softplus(decay + bias)` and `beta` by its sigmoid; query and key are scaled to length 1, and query
    is divided by the root of key_dim. query, key: `[tokens, key_heads, key_dim]`; value: `[tokens, value_heads,
    value_dim]`, whose head h uses key head `h // (value_heads / key_heads)`; decay, beta: `[tokens, value_heads]`;
    states: the matrices `S`, float32 `[blocks, value_heads, key_dim, value_dim]`. Writes the new state of each of
    `runs`.
    """
    tokens, heads, value_dim = value.shape
    check_shape("key", key, tokens, None, None)
    check_shape("query", query, *key.shape)
    if heads % key.shape[1]:
        raise ValueError(f"{heads} value heads are not a multiple of {key.shape[1]} key heads")
    for name, tensor in (("decay", decay), ("beta", beta)):
        check_shape(name, tensor, tokens, heads)
    for name, tensor in (("rate", rates.rate), ("bias", rates.bias)):
        check_shape(name, tensor, heads)
        check_dtype(name, tensor, torch.float32)
    check_shape("states", states, None, heads, key.shape[2], value_dim)
    _check_runs(runs, states)
    return pick(reference.gated_delta_rule, value)(query, key, value, decay, beta, rates, states, runs)


def state_space_scan(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    steps: torch.Tensor,
    rates: StateRates,
    states: torch.Tensor,
    runs: StateRuns,
) -> torch.Tensor:
    """Compute a state space (Mamba2, arXiv:2405.21060), token by token.

    Per head `S = e^(rate step) S + key (step value); out = query S + skip value`, with `softplus(step + bias)`, bounded
    by the limits of `rates`, in place of `step`. Returns `out` of all tokens: float32, of the shape of `value`. Tensors
    have any float dtype. query, key: `[tokens, groups, state_dim]`; value: `[tokens, heads, head_dim]`, whose head h
    uses group `h // (heads / groups)`; steps: `[tokens, heads]`; states: the matrices `S`, float32 `[blocks, heads,
    state_dim, head_dim]`. Writes the new state of each of `runs`.
    """
    tokens, heads, head_dim = value.shape
    check_shape("key", key, tokens, None, None)
    check_shape("query", query, *key.shape)
    if heads % key.shape[1]:
        raise ValueError(f"{heads} heads are not a multiple of {key.shape[1]} groups")
    check_shape("steps", steps, tokens, heads)
    for name in ("rate", "bias", "skip"):
        check_shape(name, getattr(rates, name), heads)
        check_dtype(name, getattr(rates, name), torch.float32)
    check_shape("states", states, None, heads, key.shape[2], head_dim)
    _check_runs(runs, states)
    return pick(reference.state_space_scan, value)(query, key, value, steps, rates, states, runs)


def _check_runs(runs: StateRuns, states: torch.Tensor) -> None:
    check_dtype("states", states, torch.float32)
    for name in ("sources", "destinations", "begins"):
        check_index(name, getattr(runs, name), len(runs.starts) - 1)
