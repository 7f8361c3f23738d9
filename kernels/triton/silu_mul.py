"""SiLU of one half times the other: kernels/silu_mul.py on a GPU."""

import torch
import triton
import triton.language as tl

from kernels.triton.call import KernelCall

BLOCK = 1024


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate_up = gate_up.contiguous()
    output = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    silu_mul_call(gate_up, output).start()
    return output


def silu_mul_call(gate_up: torch.Tensor, output: torch.Tensor) -> KernelCall:
    tokens, size = output.shape
    arguments = {"gate_up": gate_up, "output": output, "SIZE": size, "BLOCK": BLOCK}
    return KernelCall(gate, (tokens, -(-size // BLOCK)), arguments, warps=4)


@triton.jit
def gate(gate_up, output, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < SIZE
    gates = tl.load(gate_up + token * 2 * SIZE + places, mask=inside, other=0.0).to(tl.float32)
    ups = tl.load(gate_up + token * 2 * SIZE + SIZE + places, mask=inside, other=0.0).to(tl.float32)
    gated = (gates / (1.0 + tl.exp(-gates))).to(output.dtype.element_ty).to(tl.float32)
    tl.store(output + token * SIZE + places, (gated * ups).to(output.dtype.element_ty), mask=inside)
