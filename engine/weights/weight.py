"""Weight of a projection: numbers as stored by a checkpoint, or quantised here to fp8 (E4M3), int8 or int4.

engine/models/linear.py multiplies with these weights. AWQ and GPTQ store int4 in another layout, which read.py
converts. `columns` selects the inputs of a rank that has only some of them; scales are those of complete rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from baton.engine.weights.formats import WeightFormat
from baton.kernels.dispatch import uses_triton
from baton.kernels.types import ZERO_PARTS
from baton.text.gguf.header import TensorType

FP8_LARGEST = torch.finfo(torch.float8_e4m3fn).max  # the largest E4M3 number, 448
INT8_LARGEST = 127
LARGEST_CODE = 15
GROUP_INPUTS = 32
# Ends of the names of modules that are never quantised; kv_b_proj is part of attention.
KEPT_MODULES = (
    *("lm_head", ".gate", ".router", ".router.layer", ".router.proj", ".kv_b_proj"),
    *(".modality_router", ".prediction_coefs", ".correction_coefs"),
)
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
SMALLEST_HALF = torch.finfo(torch.float16).tiny


@dataclass(frozen=True, slots=True)
class PlainWeight:
    numbers: torch.Tensor  # [out, in]
    bias: torch.Tensor | None = None  # [out], as in all classes below


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    numbers: torch.Tensor  # float8_e4m3fn [out, in]
    scales: torch.Tensor  # float32 [out]
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class BlockFp8Weight:
    """Weight `numbers[out, in] * scales[out // block[0], in // block[1]]`."""

    numbers: torch.Tensor  # float8_e4m3fn [out, in]
    scales: torch.Tensor  # float32 [blocks of outputs, blocks of inputs]; the last blocks may be smaller
    block: tuple[int, int]  # outputs and inputs per block
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Int8Weight:
    numbers: torch.Tensor  # int8 [out, in]
    scales: torch.Tensor  # float32 [out]
    bias: torch.Tensor | None = None
    is_part: bool = False  # whether the weight has only some of the inputs; its scales are those of complete rows


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """Int4 weight whose columns are ordered by quantisation group."""

    codes: torch.Tensor  # uint8 [out, in], at most 15
    scales: torch.Tensor  # [out, groups], any float dtype
    zeros: torch.Tensor  # uint8 [out, groups], in ZERO_PARTS of a code
    column_order: torch.Tensor | None = None  # int64 [in], index of the input of each column; None: column i is input i
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Fp4Weight:
    """MXFP4 weight: codes (E2M1, see kernels/types.py), scaled by a power of two per output and group of 32 inputs."""

    codes: torch.Tensor  # uint8 [out, in], at most 15
    exponents: torch.Tensor  # uint8 [out, in / 32], biased by 127
    bias: torch.Tensor | None = None

    @property
    def scales(self) -> torch.Tensor:
        """Scales of the groups, exact in bfloat16: `[out, groups]`."""
        return torch.ldexp(torch.ones_like(self.exponents, dtype=torch.float32), self.exponents.int() - 127).bfloat16()


@dataclass(frozen=True, slots=True)
class GgufWeight:
    rows: torch.Tensor  # uint8 [out, bytes of a row]
    type: TensorType
    bias: torch.Tensor | None = None
    column_order: torch.Tensor | None = None  # as in Int4Weight


@dataclass(frozen=True, slots=True)
class StackedWeight:
    """Projections of the same input that are stored differently, so that they cannot be concatenated."""

    parts: tuple["Weight", ...]


Weight = PlainWeight | Fp8Weight | BlockFp8Weight | Int8Weight | Int4Weight | Fp4Weight | GgufWeight | StackedWeight


def with_bias(weight: Weight, bias: torch.Tensor | None) -> Weight:
    """Return a weight without a bias with this one."""
    if bias is None or isinstance(weight, StackedWeight):
        return weight
    return replace(weight, bias=bias)


def is_quantisable(module: str) -> bool:
    return not module.endswith(KEPT_MODULES)


def quantise_fp8(
    weight: torch.Tensor, bias: torch.Tensor | None = None, columns: slice = slice(None)
) -> Fp8Weight | BlockFp8Weight:
    """Quantise float32 [out, in] in groups of 32 inputs with a scale each; for Triton's kernels, which read nothing
    else, with a scale per row. `columns` must be complete groups.

    An element changes by at most the larger of 1/16 of its value and 2**-10 of its scale.
    """
    if uses_triton(weight):
        scales = (weight.abs().amax(1) / FP8_LARGEST).clamp_min(SMALLEST_SCALE)
        return Fp8Weight(_to_e4m3(weight[:, columns] / scales[:, None]), scales, bias)
    kept = weight[:, columns].contiguous()
    groups = kept.view(len(kept), -1, GROUP_INPUTS)
    fitted = [_fit_fp8(rows) for rows in groups.split(FITTED_ROWS)]
    numbers, scales = (torch.cat(parts) for parts in zip(*fitted, strict=True))
    return BlockFp8Weight(numbers.view_as(kept), scales.squeeze(2), (1, GROUP_INPUTS), bias)


def _to_e4m3(quotients: torch.Tensor) -> torch.Tensor:
    return quotients.clamp_(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn)


FP8_SCALES = 8  # tried scales, within a factor of two: with a multiple of two only exponents would change
TO_FOUR_BITS = float((1 << 20) + 1)  # factor of Veltkamp's splitting of a float32 into its upper four bits and the rest


def _fit_fp8(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return E4M3 numbers of groups, and their scales, `[..., 1]`.

    Each tried scale implies E4M3 numbers, and these the scale with the least squared error; the group keeps the best.
    """
    smallest = (groups.abs().amax(2, keepdim=True) / FP8_LARGEST).clamp_min(SMALLEST_SCALE)
    explained, scales = torch.full_like(smallest, -1.0), smallest
    for step in range(FP8_SCALES):
        quotients = groups / (smallest * 2 ** (step / FP8_SCALES))
        split = quotients * TO_FOUR_BITS
        numbers = split - (split - quotients)
        product = torch.linalg.vecdot(numbers, groups).unsqueeze(2)
        squares = torch.linalg.vecdot(numbers, numbers).unsqueeze(2).clamp_min(SMALLEST_SCALE)
        is_better = product * product / squares > explained
        explained = torch.where(is_better, product * product / squares, explained)
        scales = torch.where(is_better, product / squares, scales)
    scales = scales.clamp_min(SMALLEST_SCALE)
    return _to_e4m3(groups / scales), scales


def quantise_int8(weight: torch.Tensor, bias: torch.Tensor | None = None, columns: slice = slice(None)) -> Int8Weight:
    """Quantise float32 [out, in] with a scale per row. An element changes by at most half the scale."""
    scales = (weight.abs().amax(1) / INT8_LARGEST).clamp_min(SMALLEST_SCALE)
    integers = (weight[:, columns] / scales[:, None]).round_().clamp_(-INT8_LARGEST, INT8_LARGEST)
    return Int8Weight(integers.to(torch.int8), scales, bias, is_part=columns != slice(None))


def quantise_int4(weight: torch.Tensor, bias: torch.Tensor | None = None, columns: slice = slice(None)) -> Int4Weight:
    """Quantise float32 [out, in] in groups of 32 inputs with a scale and a zero point each.

    `columns` must be complete groups. An element changes by at most half its group's scale, or 1.5 scales at the ends
    of the range. Zero may change.
    """
    kept = weight[:, columns].contiguous()
    groups = kept.view(len(kept), -1, GROUP_INPUTS)
    fitted = [_fit_int4(rows) for rows in groups.split(FITTED_ROWS)]
    codes, scales, zeros = (torch.cat(parts) for parts in zip(*fitted, strict=True))
    return Int4Weight(codes.view_as(kept), scales.squeeze(2), zeros.squeeze(2), bias=bias)


FITTED_ROWS = 256  # rows whose temporary tensors mostly stay in the cache
STEPS_IN_RANGE = (13.6, 14.3, 15.0, 15.7)  # tried quotients of a group's range and its scale; 15 clips no number


def _fit_int4(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes, scales and zeros of groups, the latter two `[..., 1]`.

    Each tried step implies codes, and these the scale and the zero point with the least squared error, by linear
    regression; the group keeps the best ones.
    """
    low, high = groups.amin(2, keepdim=True).clamp_max(0), groups.amax(2, keepdim=True).clamp_min(0)
    span, mean = (high - low).clamp_min(SMALLEST_HALF), groups.mean(2, keepdim=True)
    explained, scales, zeros = torch.full_like(low, -1.0), low, low
    for steps in STEPS_IN_RANGE:
        inverse = steps / span
        codes = _int4_codes(groups * inverse, -low * inverse)
        middle = codes.mean(2, keepdim=True)
        deviations = codes.sub_(middle)
        product = torch.linalg.vecdot(deviations, groups).unsqueeze(2)
        squares = torch.linalg.vecdot(deviations, deviations).unsqueeze(2)
        has_slope = product > 0
        scale = torch.where(has_slope, product / squares, span / steps)
        gain = torch.where(has_slope, product * scale, 0)
        is_better = gain > explained
        explained = torch.where(is_better, gain, explained)
        scales = torch.where(is_better, scale, scales)
        zeros = torch.where(is_better, middle - mean / scale, zeros)
    zeros = zeros.mul_(ZERO_PARTS).round_().clamp_(0, ZERO_PARTS * LARGEST_CODE)
    zero = zeros / ZERO_PARTS
    numbers = _int4_codes(groups / scales, zero).sub_(zero)
    product = torch.linalg.vecdot(numbers, groups).unsqueeze(2)
    squares = torch.linalg.vecdot(numbers, numbers).unsqueeze(2)
    scales = torch.where(product > 0, product / squares, scales).clamp_min(SMALLEST_HALF).half()
    return _int4_codes(groups / scales, zero).to(torch.uint8), scales, zeros.to(torch.uint8)


def _int4_codes(quotients: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """Convert quotients of numbers and scales to codes, in place."""
    return quotients.add_(zeros).round_().clamp_(0, LARGEST_CODE)


Quantiser = Callable[[torch.Tensor, torch.Tensor | None, slice], Weight]
QUANTISERS: dict[WeightFormat, Quantiser] = {
    WeightFormat.INT8: quantise_int8,
    WeightFormat.INT4: quantise_int4,
    WeightFormat.FP8: quantise_fp8,
}


def stack_int4(weights: list[Int4Weight]) -> Int4Weight | StackedWeight:
    """Concatenate int4 weights of the same input; a StackedWeight if their column orders or groups differ."""
    first = weights[0]
    for weight in weights[1:]:
        if weight.scales.shape[1] != first.scales.shape[1] or not _same_order(weight.column_order, first.column_order):
            return StackedWeight(tuple(weights))
    codes, scales, zeros = (
        torch.cat([getattr(weight, name) for weight in weights]) for name in ("codes", "scales", "zeros")
    )
    return Int4Weight(codes, scales, zeros, first.column_order, stacked([weight.bias for weight in weights]))


def stack_weights(weights: list[Weight]) -> Weight:
    """Concatenate weights of the same input; a StackedWeight if they are of different kinds or differently grouped."""
    kinds = {type(weight) for weight in weights}
    if kinds == {Int4Weight}:
        return stack_int4([weight for weight in weights if isinstance(weight, Int4Weight)])
    if kinds == {BlockFp8Weight}:
        return stack_blocks([weight for weight in weights if isinstance(weight, BlockFp8Weight)])
    bias = stacked([weight.bias for weight in weights if not isinstance(weight, StackedWeight)])
    if kinds == {PlainWeight}:
        return PlainWeight(torch.cat([weight.numbers for weight in weights if isinstance(weight, PlainWeight)]), bias)
    for kind in (Int8Weight, Fp8Weight):
        if kinds == {kind}:
            scaled = [weight for weight in weights if isinstance(weight, Int8Weight | Fp8Weight)]
            return kind(torch.cat([each.numbers for each in scaled]), torch.cat([each.scales for each in scaled]), bias)
    return StackedWeight(tuple(weights))


def stack_blocks(weights: list[BlockFp8Weight]) -> BlockFp8Weight | StackedWeight:
    """Concatenate fp8 weights of the same input; a StackedWeight if a block would span two weights."""
    block = weights[0].block
    if any(len(weight.numbers) % block[0] for weight in weights[:-1]):
        return StackedWeight(tuple(weights))
    numbers, scales = (torch.cat([getattr(weight, name) for weight in weights]) for name in ("numbers", "scales"))
    return BlockFp8Weight(numbers, scales, block, stacked([weight.bias for weight in weights]))


def stacked(biases: list[torch.Tensor | None]) -> torch.Tensor | None:
    given = [each for each in biases if each is not None]
    return torch.cat(given) if given else None


def _same_order(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)
