"""Linear layers and embeddings. A table chooses a layer's implementation by device and stored format.

On a CPU native kernels read weights in their own layout; on a GPU Triton kernels read quantised weights as stored, for
few rows. PyTorch computes everything else, tile by tile from the stored numbers.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from baton.engine.config.model_config import ModelError
from baton.engine.models.batch import AdapterRows
from baton.engine.weights.gguf_file import CODED, PLAIN_DTYPES, Codes, codes_of, dequantise, joined
from baton.engine.weights.weight import (
    BlockFp8Weight,
    Fp4Weight,
    Fp8Weight,
    GgufWeight,
    Int4Weight,
    Int8Weight,
    PlainWeight,
    StackedWeight,
    Weight,
    stacked,
)
from baton.kernels.dispatch import uses_triton
from baton.kernels.linear import dequantise_weight, gather_rows, head_linear, packed_linear, quantised_linear
from baton.kernels.native.huge_pages import HugePages
from baton.kernels.native.library import native_library
from baton.kernels.packed_weight import (
    BYTE_INPUTS,
    PANEL,
    PackedWeight,
    Stored,
    pack,
    pack_codes,
    pack_fp4,
    pack_int4,
    pack_int8,
    takes_groups,
)
from baton.kernels.types import ZERO_PARTS, QuantisedWeight


class Linear(Protocol):
    """Function of `[tokens, in]` to `[tokens, out]`, in the dtype of `x`.

    `adapters`: rows with an adapter; only the wrapper in engine/lora/adapters.py applies them.
    """

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class DenseLinear:
    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None = None  # [out]

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class StackedLinear:
    parts: tuple[Linear, ...]

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


# Numbers of one tile. On a CPU a tile must stay in the L2 cache; on a GPU larger tiles need fewer launches.
CPU_TILE_NUMBERS = 1 << 19
CUDA_TILE_NUMBERS = 1 << 25
ROW_MULTIPLE = 32  # tiles have a multiple of this number of rows: products with narrower tiles are slow


def tiled_linear(
    x: torch.Tensor, outputs: int, rows: Callable[[slice], torch.Tensor], bias: torch.Tensor | None
) -> torch.Tensor:
    """Compute a layer's `[tokens, outputs]` tile by tile; `rows` returns weight rows, `[rows, in]`, in x's dtype."""
    numbers = CPU_TILE_NUMBERS if x.device.type == "cpu" else CUDA_TILE_NUMBERS
    height = max(numbers // x.shape[-1] // ROW_MULTIPLE, 1) * ROW_MULTIPLE
    if height >= outputs:
        return F.linear(x, rows(slice(0, outputs)), bias)
    out = x.new_empty(len(x), outputs)
    for start in range(0, outputs, height):
        tile = slice(start, min(start + height, outputs))
        out[:, tile] = F.linear(x, rows(tile), None if bias is None else bias[tile])
    return out


# 2 ** (15 - 7): the exponent bias is 15 in float16 and 7 in E4M3.
FLOAT16_RATIO = 256.0
WITHOUT_SECOND_SIGN = -16385  # int16 0xBFFF: clears bit 14, a copy of the sign


@dataclass(frozen=True, slots=True)
class Fp8Linear:
    weight: Fp8Weight

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        """Multiply by the unscaled numbers, which every dtype represents exactly, and then scale the product."""
        numbers, bias = self.weight.numbers, self.weight.bias
        out = tiled_linear(x, len(numbers), lambda tile: reduced(numbers[tile], x.dtype), None)
        out = (out * (self.weight.scales * FLOAT16_RATIO)).to(x.dtype)
        return out if bias is None else out + bias


@dataclass(frozen=True, slots=True)
class BlockFp8Linear:
    """Linear layer that dequantises each tile: scales differ by block of inputs, so they cannot scale the product."""

    weight: BlockFp8Weight

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        weight = self.weight
        return tiled_linear(x, len(weight.numbers), lambda tile: spelled_blocks(weight, tile, x.dtype), weight.bias)


def spelled_blocks(weight: BlockFp8Weight, rows: slice, dtype: torch.dtype) -> torch.Tensor:
    """Dequantise `rows` of a weight: `[rows, in]` in `dtype`."""
    height, width = weight.block
    numbers = reduced(weight.numbers[rows], torch.float32)
    if height == 1 and numbers.shape[1] % width == 0:
        numbers.unflatten(1, (-1, width)).mul_((weight.scales[rows] * FLOAT16_RATIO)[..., None])
        return numbers.to(dtype)
    blocks = torch.arange(rows.start, rows.stop, device=weight.scales.device) // height
    scales = weight.scales[blocks].repeat_interleave(width, dim=1)[:, : numbers.shape[1]]
    return numbers.mul_(scales * FLOAT16_RATIO).to(dtype)


def reduced(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return finite float8_e4m3fn numbers times 2**-8, exactly, in a wider dtype, by shifting their bits to float16.

    The detour through integers and float32 is faster on a CPU, where torch converts float8, and float16 to bfloat16,
    number by number.
    """
    bits = weight.view(torch.int8).to(torch.int16)  # sign-extended: the sign is in bits 15 to 7
    halves = bits.bitwise_left_shift_(7).bitwise_and_(WITHOUT_SECOND_SIGN).view(torch.float16)
    return halves.float().to(dtype)


# Maximum number of rows for torch's CPU kernel, which reads the integers; with more rows, tiles are faster.
INT8_KERNEL_ROWS = 16


@dataclass(frozen=True, slots=True)
class Int8Linear:
    weight: Int8Weight

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        numbers, scales, bias = self.weight.numbers, self.weight.scales, self.weight.bias
        if x.dtype == torch.bfloat16 and x.device.type == "cpu" and len(x) <= INT8_KERNEL_ROWS:
            out = torch._weight_int8pack_mm(x.contiguous(), numbers, scales.to(x.dtype))
        else:
            # Integers up to 127 are exact in every dtype, so the scales are applied to the product.
            out = tiled_linear(x, len(numbers), lambda tile: numbers[tile].to(x.dtype), None)
            out = (out * scales).to(x.dtype)
        return out if bias is None else out + bias


@dataclass(frozen=True, slots=True)
class Int4KernelLinear:
    """Linear layer in bfloat16 with torch's int4 CPU kernel: fast for few rows, slow for many on CPUs with bfloat16."""

    packed: torch.Tensor  # uint8 [out, in / 2], in the order of _convert_weight_to_int4pack_for_cpu
    scales_and_zeros: torch.Tensor  # bfloat16 [groups, out, 2]: weight = (code - 8) * scale + zero
    group_inputs: int
    column_order: torch.Tensor | None
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        ordered = x.contiguous() if self.column_order is None else x[:, self.column_order]
        out: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            ordered, self.packed, self.group_inputs, self.scales_and_zeros
        )
        return out if self.bias is None else out + self.bias


@dataclass(frozen=True, slots=True)
class GgufLinear:
    weight: GgufWeight

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        rows, kind, order = self.weight.rows, self.weight.type, self.weight.column_order
        if order is not None:
            x = x[:, order]
        return tiled_linear(x, len(rows), lambda tile: dequantise(rows[tile], kind).to(x.dtype), self.weight.bias)


KERNEL_ROWS = 64  # maximum number of rows for the kernel; with more, dequantisation is faster


@dataclass(frozen=True, slots=True)
class KernelLinear:
    """Quantised linear layer: on a GPU, a kernel reads the stored bytes for few rows; else tiles are dequantised."""

    weight: QuantisedWeight
    column_order: torch.Tensor | None  # int64 [in], input of each column; None: in order
    bias: torch.Tensor | None  # [out]

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        ordered = x if self.column_order is None else x[:, self.column_order]
        if len(x) <= KERNEL_ROWS and uses_triton(x):
            return quantised_linear(ordered, self.weight, self.bias)
        return tiled_linear(ordered, self.weight.outputs, lambda tile: self._spelled(tile, x.dtype), self.bias)

    def _spelled(self, tile: slice, dtype: torch.dtype) -> torch.Tensor:
        weight, zeros = self.weight, self.weight.zeros
        part = QuantisedWeight(weight.data[tile], weight.scales[tile], None if zeros is None else zeros[tile])
        return dequantise_weight(part, dtype)


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """Linear layer that the CPU's native kernels compute."""

    weight: PackedWeight
    wants_largest: bool = False
    """Whether there is one more input, with zero weights: the maximum of the complete row, of which this rank has a
    part. It determines the quantisation scale of the row.
    """

    def __call__(self, x: torch.Tensor, adapters: AdapterRows | None = None) -> torch.Tensor:
        return packed_linear(x.float(), self.weight).to(x.dtype)


def packed_weight(linear: Linear) -> PackedWeight | None:
    return linear.weight if isinstance(linear, PackedLinear) else None


@dataclass(frozen=True, slots=True)
class DenseHeads:
    weight: torch.Tensor  # [heads, out, in]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x.transpose(0, 1), self.weight.transpose(1, 2)).transpose(0, 1)


@dataclass(frozen=True, slots=True)
class PackedHeads:
    """One linear layer per head, which the CPU's native kernels compute."""

    weight: PackedWeight  # weights of all heads, each padded to complete panels
    heads: int
    outputs: int  # outputs per head

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return head_linear(x.float(), self.weight, self.heads)[..., : self.outputs].to(x.dtype)


HeadLinear = DenseHeads | PackedHeads
"""Function of `[tokens, heads, in]` to `[tokens, heads, out]` with one weight per head, in the dtype of `x`."""


class Kernels(enum.Enum):
    TORCH = enum.auto()
    TRITON = enum.auto()  # on a GPU
    NATIVE = enum.auto()  # on a CPU


def packs(device: torch.device) -> bool:
    """Return whether the device has native kernels, which read packed weights and are faster than PyTorch."""
    return device.type == "cpu" and native_library() is not None


class MatmulBackend:
    """Factory of a model's linear layers."""

    def __init__(self, device: torch.device, dtype: torch.dtype, packed: bool = False) -> None:
        """Choose the kernels. `dtype`: activations' dtype. `packed`: use the CPU's native kernels if they are built."""
        self.device = device
        self.dtype = dtype
        self.kernels = Kernels.TORCH
        if packed and packs(device):
            self.kernels = Kernels.NATIVE
        elif uses_triton(torch.empty(0, device=device)):
            self.kernels = Kernels.TRITON
        self._pages = HugePages()

    @property
    def is_native(self) -> bool:
        return self.kernels is Kernels.NATIVE

    def linear(self, weight: Weight) -> Linear:
        make = MAKERS.get((self.kernels, type(weight))) or MAKERS[Kernels.TORCH, type(weight)]
        return make(weight, self)

    def heads(self, weight: torch.Tensor) -> HeadLinear:
        """Build one linear layer per head from weight `[heads, out, in]`."""
        count, outputs, _ = weight.shape
        if not self.is_native:
            return DenseHeads(weight.contiguous())
        padded = F.pad(weight, (0, 0, 0, -outputs % PANEL)).flatten(0, 1)
        return PackedHeads(self.packed(pack(padded, _lossless(padded), None)).weight, count, outputs)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to huge pages for native kernels: a view of a file would keep the complete file in memory."""
        return self._pages.copy(tensor) if self.is_native else tensor

    def packed(self, weight: PackedWeight, wants_largest: bool = False) -> PackedLinear:
        """Copy all tensors of a packed weight: uncopied ones would keep memory alive that loading should free."""
        rest = (weight.bias, weight.scales, weight.zeros, weight.offsets)
        bias, scales, zeros, offsets = (None if part is None else self.keep(part) for part in rest)
        data = self.keep(weight.data)
        copied = replace(weight, data=data, bias=bias, scales=scales, zeros=zeros, offsets=offsets)
        return PackedLinear(copied, wants_largest)


def spelled_out(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """Return a weight as plain numbers `[out, in]`. Raises: ModelError for a format without such a conversion."""
    if isinstance(weight, PlainWeight):
        return weight.numbers
    if isinstance(weight, BlockFp8Weight):
        return spelled_blocks(weight, slice(0, len(weight.numbers)), dtype)
    if isinstance(weight, Int4Weight):
        groups = weight.codes.float().unflatten(1, (weight.scales.shape[1], -1))
        zeros, scales = (each.float()[..., None] for each in (weight.zeros / ZERO_PARTS, weight.scales))
        numbers: torch.Tensor = ((groups - zeros) * scales).flatten(1)
        if weight.column_order is not None:
            numbers = torch.empty_like(numbers).index_copy_(1, weight.column_order, numbers)
        return numbers.to(dtype)
    raise ModelError(f"{type(weight).__name__} cannot be dequantised as a whole")


AT_ONCE_ROWS = 4096  # number of rows that are inspected together


def is_bfloat16(tensor: torch.Tensor) -> bool:
    """Return whether a float32 tensor contains only bfloat16 numbers."""
    return all(torch.equal(part, part.bfloat16().float()) for part in tensor.split(AT_ONCE_ROWS))


def _packed_plain(weight: PlainWeight, backend: MatmulBackend) -> Linear:
    return backend.packed(pack(weight.numbers, _lossless(weight.numbers), weight.bias))


def _lossless(numbers: torch.Tensor) -> Stored:
    """Return the shortest storage in which a plain weight loses nothing."""
    if numbers.dtype == torch.bfloat16:
        return Stored.ROUNDING
    return Stored.BFLOAT16 if is_bfloat16(numbers) else Stored.FLOAT32


def _packed_int8(weight: Int8Weight, backend: MatmulBackend) -> Linear:
    """Pack an int8 weight. A part of one needs the largest input of the complete row, unless groups are rounded."""
    native = native_library()
    if native is not None and native.multiplies_bytes and weight.numbers.shape[1] % BYTE_INPUTS == 0:
        return backend.packed(pack_int8(weight.numbers, weight.scales, weight.bias, rounds_to_bytes=True))
    numbers = F.pad(weight.numbers, (0, 1)) if weight.is_part else weight.numbers
    return backend.packed(pack_int8(numbers, weight.scales, weight.bias), weight.is_part)


def _packed_int4(weight: Int4Weight, backend: MatmulBackend) -> Linear:
    """Pack an int4 weight; leave it to PyTorch if native kernels do not support its column order, groups or scales."""
    scales, inputs = weight.scales.half(), weight.codes.shape[1]
    fits = weight.column_order is None and takes_groups(inputs, scales.shape[1])
    if not fits or not torch.equal(scales.to(weight.scales.dtype), weight.scales):
        return _two_codes_a_byte(weight)
    return backend.packed(pack_int4(weight.codes, scales, weight.zeros, weight.bias))


def _packed_fp4(weight: Fp4Weight, backend: MatmulBackend) -> Linear:
    """Pack an FP4 weight; leave it to PyTorch if a halved scale, except of a group of zeros, is inexact in float16."""
    is_zero = ((weight.codes & 7).unflatten(1, (weight.exponents.shape[1], -1)) == 0).all(-1)
    scales = weight.scales.masked_fill(is_zero, 1.0).float() / 2
    halves = scales.half()
    if not torch.equal(halves.float(), scales) or not takes_groups(weight.codes.shape[1], scales.shape[1]):
        return _fp4(weight, backend)
    return backend.packed(pack_fp4(weight.codes, halves, weight.bias))


def _two_codes_a_byte(weight: Int4Weight) -> KernelLinear:
    read = QuantisedWeight(_halves_together(weight.codes), weight.scales, weight.zeros)
    return KernelLinear(read, weight.column_order, weight.bias)


def _fp4(weight: Fp4Weight, backend: MatmulBackend) -> Linear:
    return KernelLinear(QuantisedWeight(_halves_together(weight.codes), weight.scales), None, weight.bias)


def _halves_together(codes: torch.Tensor) -> torch.Tensor:
    """Pack two 4-bit codes into each byte, in the order of QuantisedWeight."""
    half = codes.shape[1] // 2
    return codes[:, :half] | (codes[:, half:] << 4)


INT4_KERNEL_GROUPS = (32, 64, 128, 256)
INT4_KERNEL_OUTPUT_MULTIPLE = 16
INT4_KERNEL_MIDDLE = 8  # zero point that torch's int4 kernel assumes


def _torch_int4(weight: Int4Weight, backend: MatmulBackend) -> Linear:
    outputs, inputs = weight.codes.shape
    group_inputs = inputs // weight.scales.shape[1]
    fits = outputs % INT4_KERNEL_OUTPUT_MULTIPLE == 0 and group_inputs in INT4_KERNEL_GROUPS
    if backend.dtype != torch.bfloat16 or weight.codes.device.type != "cpu" or not fits:
        return _two_codes_a_byte(weight)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.codes.int(), 1)
    scales = weight.scales.float()
    offsets = (INT4_KERNEL_MIDDLE - weight.zeros.float() / ZERO_PARTS) * scales
    pairs = torch.stack([scales, offsets], dim=2).transpose(0, 1).to(backend.dtype).contiguous()
    return Int4KernelLinear(packed, pairs, group_inputs, weight.column_order, weight.bias)


def _triton_8_bits(weight: Int8Weight | Fp8Weight, backend: MatmulBackend) -> Linear:
    return KernelLinear(QuantisedWeight(weight.numbers, weight.scales), None, weight.bias)


EXPANDED_ROWS = 4096  # rows of a GGUF tensor that are dequantised together, so that float32 copies remain small


def _gguf(weight: GgufWeight, backend: MatmulBackend) -> Linear:
    return _expanded_gguf(weight, backend) if weight.type in PLAIN_DTYPES else GgufLinear(weight)


def _packed_gguf(weight: GgufWeight, backend: MatmulBackend) -> Linear:
    """Pack a GGUF weight as stored if native kernels read its type, else as plain numbers."""
    coding, order = CODED.get(weight.type), weight.column_order
    if coding is None:
        return _expanded_gguf(weight, backend)
    codes = codes_of(weight.rows, weight.type)
    if order is not None:
        groups = order.view(-1, coding.inputs)
        if not torch.equal(groups - groups[:, :1], torch.arange(coding.inputs).expand_as(groups)):
            return _expanded_gguf(weight, backend)  # a group would be divided
        codes = codes.of_groups((groups[:, 0] // coding.inputs).argsort())
    return _packed_codes(codes, weight.bias, backend)


def _packed_codes(codes: Codes, bias: torch.Tensor | None, backend: MatmulBackend) -> Linear:
    offsets = None if codes.offsets is None else codes.offsets.flatten(1).half()
    return backend.packed(pack_codes(codes.codes.flatten(1), codes.scales.flatten(1).half(), offsets, bias))


def _packed_stack(weight: StackedWeight, backend: MatmulBackend) -> Linear:
    """Pack projections of several GGUF types as one weight of 8-bit codes in the smallest groups of any of them."""
    parts = weight.parts
    if not all(isinstance(part, GgufWeight) and part.type in CODED for part in parts):
        return StackedLinear(tuple(map(backend.linear, parts)))
    own = [part for part in parts if isinstance(part, GgufWeight)]
    coded = [codes_of(part.rows, part.type) for part in own]
    inputs = min(codes.codes.shape[-1] for codes in coded)
    whole = joined([codes.in_groups(inputs) for codes in coded])
    return _packed_codes(whole, stacked([part.bias for part in own]), backend)


def _expanded_gguf(weight: GgufWeight, backend: MatmulBackend) -> Linear:
    numbers = torch.cat([dequantise(rows, weight.type).to(backend.dtype) for rows in weight.rows.split(EXPANDED_ROWS)])
    if weight.column_order is not None:
        numbers = numbers[:, weight.column_order.argsort()]
    return backend.linear(PlainWeight(numbers, weight.bias))


MAKERS: dict[tuple[Kernels, type[Weight]], Callable[[Any, MatmulBackend], Linear]] = {
    (Kernels.TORCH, PlainWeight): lambda weight, backend: DenseLinear(weight.numbers, weight.bias),
    (Kernels.TORCH, Fp8Weight): lambda weight, backend: Fp8Linear(weight),
    (Kernels.TORCH, BlockFp8Weight): lambda weight, backend: BlockFp8Linear(weight),
    (Kernels.TORCH, Int8Weight): lambda weight, backend: Int8Linear(weight),
    (Kernels.TORCH, Int4Weight): _torch_int4,
    (Kernels.TORCH, Fp4Weight): _fp4,
    (Kernels.TORCH, GgufWeight): _gguf,
    (Kernels.TORCH, StackedWeight): lambda weight, backend: StackedLinear(tuple(map(backend.linear, weight.parts))),
    (Kernels.TRITON, Fp8Weight): _triton_8_bits,
    (Kernels.TRITON, Int8Weight): _triton_8_bits,
    (Kernels.TRITON, Int4Weight): lambda weight, backend: _two_codes_a_byte(weight),
    (Kernels.NATIVE, PlainWeight): _packed_plain,
    (Kernels.NATIVE, Int8Weight): _packed_int8,
    (Kernels.NATIVE, Int4Weight): _packed_int4,
    (Kernels.NATIVE, Fp4Weight): _packed_fp4,
    (Kernels.NATIVE, GgufWeight): _packed_gguf,
    (Kernels.NATIVE, StackedWeight): _packed_stack,
}


@dataclass(frozen=True, slots=True)
class DenseEmbedding:
    weight: torch.Tensor  # [vocab, hidden]

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, self.weight)


@dataclass(frozen=True, slots=True)
class PackedEmbedding:
    """Embedding that reads the rows of the tied head: both share one copy in memory."""

    weight: PackedWeight  # plain numbers in packed order, see kernels/linear.py

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return gather_rows(token_ids, self.weight)


Embedding = DenseEmbedding | PackedEmbedding
"""Function of valid token ids to a new floating-point `[tokens, hidden]`."""
