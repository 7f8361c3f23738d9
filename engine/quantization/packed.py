"""Weights of 4 bits as AWQ and GPTQ checkpoints pack them, eight to an int32; codes and scales are taken as they are.

AWQ: https://arxiv.org/abs/2306.00978, its "gemm" packing. GPTQ: https://arxiv.org/abs/2210.17323.
"""

from typing import Protocol

import torch

from engine.model_config import ModelError
from engine.quantization.formats import PackedFormat, WeightFormat
from engine.quantization.int4 import Int4Weight

PER_WORD = 8
# The nibble of an AWQ word, lowest first, that holds each of its eight columns.
AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
ONE_IN_EACH_NIBBLE = 0x11111111
SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class StoredTensors(Protocol):
    """Tensors of a checkpoint by name, in any dtype."""

    def has(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises: ModelError if absent."""

    def take_stored(self, name: str, dtypes: tuple[torch.dtype, ...], *shape: int) -> torch.Tensor:
        """As stored, on the device to compute on; raises ModelError if absent, misshapen or of another dtype."""


def read_packed(tensors: StoredTensors, packed: PackedFormat, module: str, outputs: int, inputs: int) -> Int4Weight:
    """The module's qweight, qzeros, scales and, for GPTQ, g_idx. Raises: ModelError."""
    groups = tensors.shape(f"{module}.scales")[0]
    if inputs % PER_WORD or outputs % PER_WORD or not groups or inputs % groups:
        raise ModelError(f"{module} of {outputs} x {inputs} in {groups} groups cannot be read as 4-bit weights")
    scales = tensors.take_stored(f"{module}.scales", SCALE_DTYPES, groups, outputs)
    qzeros = tensors.take_stored(f"{module}.qzeros", (torch.int32,), groups, outputs // PER_WORD)
    if packed.format is WeightFormat.AWQ:
        qweight = tensors.take_stored(f"{module}.qweight", (torch.int32,), inputs, outputs // PER_WORD)
        codes, zeros = (_nibbles(words)[..., AWQ_NIBBLES].flatten(1) for words in (qweight, qzeros))
        return Int4Weight(codes.T.contiguous(), scales.T.contiguous(), zeros.T.contiguous(), None)
    qweight = tensors.take_stored(f"{module}.qweight", (torch.int32,), inputs // PER_WORD, outputs)
    if packed.zeros_less_one:
        # Whole words, as GPTQModel does: where a zero point was 0, the subtraction had borrowed from its neighbour.
        qzeros = qzeros + ONE_IN_EACH_NIBBLE
    codes = _nibbles(qweight.T).flatten(1)  # [out, in]
    zeros = _nibbles(qzeros).flatten(1).T.contiguous()
    order = _column_order(tensors, module, inputs, groups)
    return Int4Weight(codes if order is None else codes[:, order], scales.T.contiguous(), zeros, order)


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """int32 [...] to uint8 [..., 8], lowest bits first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & 15).to(torch.uint8)


def _column_order(tensors: StoredTensors, module: str, inputs: int, groups: int) -> torch.Tensor | None:
    """The inputs sorted by their group; None where they are already."""
    groups_of_inputs = tensors.take_stored(f"{module}.g_idx", (torch.int32,), inputs).long()
    order = groups_of_inputs.argsort(stable=True)
    expected = torch.arange(inputs, device=order.device) // (inputs // groups)
    if not torch.equal(groups_of_inputs[order], expected):
        raise ModelError(f"{module}.g_idx does not put {inputs // groups} inputs into each of {groups} groups")
    return None if torch.equal(groups_of_inputs, expected) else order
