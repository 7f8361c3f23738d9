"""Weights in the packed layout of the CPU kernels, see kernels/linear.py.

bfloat16 weights take half the memory of float32, without loss if the checkpoint has bfloat16. int8 weights have a scale
per output. On processors with VNNI, each input row is quantised to 8 bits with a scale and a zero point per group of
BYTE_INPUTS inputs, otherwise to 16 bits with a scale per row. 8 bits with a scale per row are too few: a single large
input would make all other inputs inexact, which costs a small model 4 % of perplexity. int4 weights are
codes of 0 to 15 in groups of inputs, with weight = (code - zero) * scale. Their inputs are quantised to 8 bits (W4A8)
with a scale per row and group, as in llama.cpp's Q8_0. With one scale for the complete row, a single large input would
make all other inputs inexact. A scale per group costs only one more multiplication per group and output. fp4 weights
are E2M1 codes in such groups; a table converts these codes to integers. code4 and code8 weights are codes in groups
with a scale and perhaps an offset each, as in GGUF files: weight = code * scale + offset. Their inputs are quantised to
16 bits with a scale per row and group, since rounding them to 8 bits changes answers of small models.
"""

import enum
from dataclasses import dataclass

import torch

from baton.kernels.types import E2M1, ZERO_PARTS, Gate, Routing, check_dtype, check_shape

PANEL = 32  # number of outputs that are stored next to one another
MOST_GROUP_INPUTS = 256
BYTE_INPUTS = 32  # inputs that share a scale where int8 weights are multiplied by bytes


class Stored(enum.IntEnum):
    """Format of a packed weight, and rounding of its inputs. Products are summed in float32, or exactly as integers."""

    FLOAT32 = 0
    BFLOAT16 = 1  # inputs are not rounded
    ROUNDING = 2  # weight is bfloat16; inputs are rounded to bfloat16
    INT8 = 3  # inputs are rounded to integers: of 16 bits times a scale per row, or bytes times a scale per group
    INT4 = 4  # inputs are rounded to integers times a scale per row and group of inputs
    FP4 = 5  # inputs are rounded as for INT4
    CODE4 = 6  # codes of 0 to 15; inputs are rounded to integers of 16 bits times a scale per row and group
    CODE8 = 7  # codes of -128 to 127


GROUPED = (Stored.INT4, Stored.FP4, Stored.CODE4, Stored.CODE8)
SIDE_BY_SIDE = {
    Stored.FLOAT32: 1,
    Stored.BFLOAT16: 2,
    Stored.ROUNDING: 2,
    Stored.INT8: 4,
    Stored.INT4: 8,
    Stored.FP4: 8,
    Stored.CODE4: 8,
    Stored.CODE8: 4,
}
DTYPES = {
    Stored.FLOAT32: torch.float32,
    Stored.BFLOAT16: torch.bfloat16,
    Stored.ROUNDING: torch.bfloat16,
    Stored.INT8: torch.int8,
    Stored.CODE8: torch.int8,
}


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Weight in panels of 32 outputs, for the CPU kernels. `data`: `[panels, ceil(inputs / n), 32, n]`, zero-padded.

    n = SIDE_BY_SIDE[stored] is the number of adjacent numbers of one output. In formats of 4 bits two codes share a
    byte: `data` is `[panels, inputs / 8, 32, 4]`, with the first four of eight codes in the low nibbles. A shift and a
    mask then yield two words of four bytes, each with the codes of four consecutive inputs.
    """

    data: torch.Tensor
    stored: Stored
    outputs: int
    inputs: int
    bias: torch.Tensor | None  # float32 [outputs]
    scales: torch.Tensor | None = None  # INT8: float32 [32 * panels]; GROUPED: float16 [panels, groups, 32]
    zeros: torch.Tensor | None = None  # INT4, FP4: uint8 [panels, groups, 32], in ZERO_PARTS of a code
    offsets: torch.Tensor | None = None  # CODE4, CODE8: float16 [panels, groups, 32]; None: no offsets
    group_inputs: int = 0  # GROUPED: inputs per group; INT8: inputs rounded to bytes with a common scale; 0: to 16 bits

    @property
    def nbytes(self) -> int:
        parts = (self.data, self.scales, self.zeros, self.offsets, self.bias)
        return sum(part.nbytes for part in parts if part is not None)


@dataclass(frozen=True, slots=True)
class PackedGated:
    """Packed gated feed-forward layer: SwiGLU (arXiv:2002.05202) or similar."""

    gate_up: PackedWeight  # weight that computes all gates, followed by all factors of these gates
    down: PackedWeight
    gate: Gate | None  # None: no gates; the inner numbers are squares of ReLU


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PackedExperts:
    """Packed feed-forward layer of experts with equal input and output sizes."""

    router: PackedWeight  # weight that computes one logit per expert
    routing: Routing
    correction: torch.Tensor | None  # float32 [experts], see `Routing.corrected`
    experts: tuple[PackedGated, ...]
    shared: PackedGated | None  # expert that computes every row, in addition to the chosen ones
    shared_gate: PackedWeight | None  # weight that computes the logit of the gate of `shared`; None: no gate


def pack(weight: torch.Tensor, stored: Stored, bias: torch.Tensor | None) -> PackedWeight:
    """Pack `weight`, `[outputs, inputs]`, in a float format: FLOAT32, BFLOAT16 or ROUNDING. bias: `[outputs]`."""
    data = _panels(weight.to(DTYPES[stored]), SIDE_BY_SIDE[stored])
    outputs, inputs = weight.shape
    return PackedWeight(data, stored, outputs, inputs, None if bias is None else bias.float())


def pack_int8(
    weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, rounds_to_bytes: bool = False
) -> PackedWeight:
    """Pack int8 `[outputs, inputs]`; the represented numbers are `weight * scales[:, None]`. bias: `[outputs]`.

    rounds_to_bytes: whether inputs, a multiple of BYTE_INPUTS, are rounded to bytes. It requires
    `NativeLibrary.multiplies_bytes`.
    """
    check_dtype("weight", weight, torch.int8)
    check_shape("scales", scales, len(weight))
    outputs, inputs = weight.shape
    return PackedWeight(
        _panels(weight, SIDE_BY_SIDE[Stored.INT8]),
        Stored.INT8,
        outputs,
        inputs,
        None if bias is None else bias.float(),
        torch.nn.functional.pad(scales.float(), (0, -outputs % PANEL)),
        group_inputs=BYTE_INPUTS if rounds_to_bytes else 0,
    )


def takes_groups(inputs: int, groups: int) -> bool:
    """Return whether pack_int4() supports `inputs` inputs in `groups` groups."""
    size = inputs // groups
    return inputs % groups == 0 and size % SIDE_BY_SIDE[Stored.INT4] == 0 and size <= MOST_GROUP_INPUTS


def pack_int4(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bias: torch.Tensor | None
) -> PackedWeight:
    """Pack `codes`, uint8 `[outputs, inputs]`, each at most 15.

    scales: positive float16 `[outputs, groups]`; zeros: uint8 `[outputs, groups]`, in ZERO_PARTS.
    The inputs of a group are a multiple of 8, at most 256.
    """
    check_dtype("codes", codes, torch.uint8)
    check_dtype("scales", scales, torch.float16)
    return _pack_codes(codes, scales, zeros, bias, Stored.INT4)


FP4_ZERO = 12  # added by native/formats.h, which reads an E2M1 code as twice its value plus FP4_ZERO


def pack_fp4(codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> PackedWeight:
    """Pack E2M1 codes, uint8 `[outputs, inputs]`, in groups like those of pack_int4().

    scales: float16 `[outputs, groups]`, halves of the groups' scales, since kernels read a code as twice its value.
    """
    check_dtype("codes", codes, torch.uint8)
    check_dtype("scales", scales, torch.float16)
    return _pack_codes(
        codes, scales, torch.full_like(scales, FP4_ZERO * ZERO_PARTS, dtype=torch.uint8), bias, Stored.FP4
    )


def pack_codes(
    codes: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None, bias: torch.Tensor | None
) -> PackedWeight:
    """Pack `codes`, `[outputs, inputs]`: uint8 of at most 15 as CODE4, int8 as CODE8. Numbers: `code * scale + offset`.

    scales, offsets: finite float16 `[outputs, groups]`. The inputs of a group are a multiple of 8, at most 256.
    """
    check_dtype("scales", scales, torch.float16)
    if offsets is not None:
        check_dtype("offsets", offsets, torch.float16)
    return _pack_codes(codes, scales, None, bias, Stored.CODE8 if codes.dtype == torch.int8 else Stored.CODE4, offsets)


def _pack_codes(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None,
    stored: Stored,
    offsets: torch.Tensor | None = None,
) -> PackedWeight:
    outputs, inputs = codes.shape
    groups = scales.shape[1]
    if not takes_groups(inputs, groups):
        raise ValueError(
            f"{inputs} inputs in {groups} groups: a group must be a multiple of 8, at most {MOST_GROUP_INPUTS}"
        )
    data = _panels(codes, SIDE_BY_SIDE[stored])
    if stored is not Stored.CODE8:
        first, second = data.chunk(2, dim=-1)
        data = first | second << 4
    per_group = [None if each is None else _panels(each, 1).squeeze(-1) for each in (scales, zeros, offsets)]
    return PackedWeight(
        data,
        stored,
        outputs,
        inputs,
        None if bias is None else bias.float(),
        scales=per_group[0],
        zeros=per_group[1],
        offsets=per_group[2],
        group_inputs=inputs // groups,
    )


def unpacked(weight: PackedWeight) -> torch.Tensor:
    """Unpack to `[outputs, inputs]`: GROUPED formats to scaled float32, others to the stored, unscaled numbers."""
    if weight.stored in GROUPED and weight.scales is not None:
        numbers = weight.data
        if weight.stored is not Stored.CODE8:
            numbers = torch.cat((weight.data & 15, weight.data >> 4), dim=-1)
        if weight.stored is Stored.FP4:
            numbers = 2 * torch.tensor(E2M1)[numbers.int()] + FP4_ZERO
        spelled_out: torch.Tensor = _outputs_first(numbers).float().unflatten(1, (-1, weight.group_inputs))
        if weight.zeros is not None:
            spelled_out = spelled_out - _of_groups(weight.zeros) / ZERO_PARTS
        spelled_out = spelled_out * _of_groups(weight.scales)
        if weight.offsets is not None:
            spelled_out = spelled_out + _of_groups(weight.offsets)
        return spelled_out.flatten(1)[: weight.outputs]
    return _outputs_first(weight.data)[: weight.outputs, : weight.inputs]


def _of_groups(panels: torch.Tensor) -> torch.Tensor:
    """Reorder `[panels, groups, 32]` to float32 `[32 * panels, groups, 1]`."""
    return _outputs_first(panels.unsqueeze(-1)).float()[..., None]


def _outputs_first(panels: torch.Tensor) -> torch.Tensor:
    """Reorder `[panels, ..., 32, n]` to `[32 * panels, ...]`."""
    return panels.transpose(1, 2).reshape(len(panels) * PANEL, -1)


def _panels(weight: torch.Tensor, side_by_side: int) -> torch.Tensor:
    outputs, inputs = weight.shape
    missing = (0, -inputs % side_by_side, 0, -outputs % PANEL)
    padded = torch.nn.functional.pad(weight, missing) if any(missing) else weight.contiguous()  # pad() always copies
    return padded.view(-1, PANEL, padded.shape[1] // side_by_side, side_by_side).transpose(1, 2).contiguous()
