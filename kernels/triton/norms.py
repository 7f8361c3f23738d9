"""RMSNorm, alone or after adding a residual, and the gate of a feed-forward layer: kernels/norms.py on a GPU."""

import torch
import triton
import triton.language as tl

from baton.kernels.triton.launch import KernelCall, power_of_two
from baton.kernels.types import SWIGLU_ALPHA, SWIGLU_LIMIT, Gate

GELU, CLAMPED = tl.constexpr(int(Gate.GELU)), tl.constexpr(int(Gate.CLAMPED))
SIGMOID = tl.constexpr(int(Gate.SIGMOID))
_LIMIT, _ALPHA = tl.constexpr(SWIGLU_LIMIT), tl.constexpr(SWIGLU_ALPHA)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.contiguous()
    output = torch.empty_like(x)
    norm_call(x, None, weight, eps, output).start()
    return output


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.contiguous()
    output = torch.empty_like(x)
    norm_call(x, residual, weight, eps, output).start()
    return output


def norm_call(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, output: torch.Tensor
) -> KernelCall:
    size = x.shape[-1]
    block = power_of_two(size)
    arguments = {
        "x": x,
        "residual": residual,
        "weight": weight,
        "output": output,
        "eps": eps,
        "SIZE": size,
        "BLOCK": block,
    }
    return KernelCall(normalise, (x.numel() // size,), arguments, warps=min(max(block // 512, 1), 16))


@triton.jit
def normalised(wide, mean, factors, eps, stored: tl.constexpr, dtype: tl.constexpr):
    """Normalise float32 numbers, round them to the weights' dtype, and multiply by the weights."""
    return ((wide * tl.rsqrt(mean + eps)).to(stored).to(tl.float32) * factors).to(dtype)


@triton.jit
def normalise(x, residual, weight, output, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * SIZE
    places = tl.arange(0, BLOCK)
    inside = places < SIZE
    wide = tl.load(x + row + places, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        wide += tl.load(residual + row + places, mask=inside, other=0.0).to(tl.float32)
        stored = wide.to(residual.dtype.element_ty)
        tl.store(residual + row + places, stored, mask=inside)
        wide = stored.to(tl.float32)  # normalise the rounded sum: the residual as later layers read it
    factors = tl.load(weight + places, mask=inside, other=0.0).to(tl.float32)
    normal = normalised(
        wide, tl.sum(wide * wide, 0) / SIZE, factors, eps, weight.dtype.element_ty, output.dtype.element_ty
    )
    tl.store(output + row + places, normal, mask=inside)


BLOCK = 1024


def gate_mul(gate_up: torch.Tensor, gate: Gate = Gate.SILU) -> torch.Tensor:
    gate_up = gate_up.contiguous()
    output = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    gate_call(gate_up, gate, output).start()
    return output


def gate_call(gate_up: torch.Tensor, kind: Gate, output: torch.Tensor) -> KernelCall:
    tokens, size = output.shape
    arguments = {"gate_up": gate_up, "output": output, "GATE": int(kind), "SIZE": size, "BLOCK": BLOCK}
    return KernelCall(gate, (tokens, -(-size // BLOCK)), arguments, warps=4)


@triton.jit
def gated(gates, ups, GATE: tl.constexpr, dtype: tl.constexpr):
    """Apply the activation to gates in float32, round, and multiply by the factors, `ups`."""
    opening = gates
    if GATE == GELU:
        opening = 1.5957691216057308 * (gates + 0.044715 * gates * gates * gates)
    if GATE == CLAMPED:
        gates = tl.where(gates > _LIMIT, _LIMIT, gates)  # a comparison, since a minimum would lose NaN
        ups = tl.where(ups > _LIMIT, _LIMIT, tl.where(ups < -_LIMIT, -_LIMIT, ups)) + 1.0
        opening = _ALPHA * gates
    opened = 1.0 if GATE == SIGMOID else gates
    return ((opened / (1.0 + tl.exp(-opening))).to(dtype).to(tl.float32) * ups).to(dtype)


@triton.jit
def gate(gate_up, output, GATE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < SIZE
    gates = tl.load(gate_up + token * 2 * SIZE + places, mask=inside, other=0.0).to(tl.float32)
    ups = tl.load(gate_up + token * 2 * SIZE + SIZE + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + token * SIZE + places, gated(gates, ups, GATE, output.dtype.element_ty), mask=inside)
