"""Projections that other tools quantised, in a checkpoint that also has plain tensors; found by the tensors' names.

compressed-tensors (llm-compressor): `weight` in int8 or E4M3 with `weight_scale` per tensor or output, and
`weight_packed` with codes of 4 or 8 bits and scales per group; https://github.com/vllm-project/compressed-tensors.
vLLM's, AutoFP8's and ModelOpt's FP8 is stored likewise; DeepSeek's and that of transformers with `weight_scale_inv`,
which is no inverse, of a matrix or its blocks. ModelOpt's NVFP4 has codes in `weight`, and `weight_scale_2`;
https://github.com/NVIDIA/Model-Optimizer. bitsandbytes: NF4 and FP4 codes with `absmax` per block, perhaps quantised
themselves, and int8 with `SCB`; https://github.com/bitsandbytes-foundation/bitsandbytes, functional.py. Inputs are not
rounded as the recipes say: products with unrounded inputs are nearer to those of the original weights.
"""

import json
import math

import torch

from baton.engine.config.model_config import ModelError
from baton.engine.weights.experts import StoredTensors
from baton.engine.weights.weight import BlockFp8Weight, Fp8Weight, Int4Weight, Int8Weight, PlainWeight, Weight
from baton.kernels.types import E2M1, ZERO_PARTS

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SCALES = (*FLOATS, torch.float8_e8m0fnu)
CODES = (torch.int8, torch.float8_e4m3fn)
SCALE, PACKED, ABSMAX, ROW_SCALES = "weight_scale", "weight_packed", "weight.absmax", "SCB"
SCALE_INV, ZEROS = "weight_scale_inv", "weight_zero_point"
UNUSED_ENDS = (
    *("input_scale", "input_zero_point", "activation_scale", "output_scale", "q_scale", "k_scale", "v_scale"),
    *("input_global_scale", "weight_shape", "weight_format"),
)
"""Ends of the names of tensors that describe inputs, KV or shapes, which are not needed here."""
BNB_STATE = "weight.quant_state.bitsandbytes__"
BNB_INT8_LARGEST = 127.0
GLOBAL_SCALE = "weight_global_scale"
SECOND_SCALE = "weight_scale_2"  # ModelOpt's reciprocal of GLOBAL_SCALE
EXPONENT_BIAS = 127
UNSET = -1  # group of inputs that the quantiser left in order


def is_quantised_here(tensors: StoredTensors, module: str) -> bool:
    """Return whether a checkpoint has a projection in one of these forms."""
    return any(tensors.has(f"{module}.{end}") for end in (SCALE, SCALE_INV, PACKED, ABSMAX, ROW_SCALES))


def column_order(tensors: StoredTensors, name: str, inputs: int, groups: int) -> torch.Tensor | None:
    """Return the indexes of the inputs sorted by group; None if they are in order. Raises: ModelError.

    `name`: tensor with the group of each input, which may be missing, or contain -1 only.
    """
    if not tensors.has(name):
        return None
    of_inputs = tensors.read(name, (torch.int32,), inputs).long()
    order = of_inputs.argsort(stable=True)
    expected = torch.arange(inputs, device=order.device) // (inputs // groups)
    if torch.equal(of_inputs, expected) or of_inputs.eq(UNSET).all():
        return None
    if not torch.equal(of_inputs[order], expected):
        raise ModelError(f"{name} does not put {inputs // groups} inputs into each of {groups} groups")
    return order


def read_quantised(
    tensors: StoredTensors, module: str, outputs: int, inputs: int, dtype: torch.dtype, block: tuple[int, int]
) -> Weight:
    """Read a projection without its bias. Raises: ModelError.

    `dtype`: compute dtype, of weights that are expanded. `block`: outputs and inputs per scale of FP8 in blocks.
    """
    if tensors.has(f"{module}.{PACKED}"):
        return _packed(tensors, module, outputs, inputs, dtype)
    if tensors.has(f"{module}.{SECOND_SCALE}"):
        return PlainWeight(_fp4(tensors, module, outputs, inputs).to(dtype))
    if tensors.has(f"{module}.{ABSMAX}"):
        return PlainWeight(_bitsandbytes(tensors, module, outputs, inputs).to(dtype))
    numbers = tensors.take(f"{module}.weight", CODES, outputs, inputs)
    if tensors.has(f"{module}.{ROW_SCALES}"):
        return Int8Weight(numbers, tensors.take(f"{module}.{ROW_SCALES}", FLOATS, outputs).float() / BNB_INT8_LARGEST)
    name = f"{module}.{SCALE if tensors.has(f'{module}.{SCALE}') else SCALE_INV}"
    stated, blocks = tensors.shape(name), (-(-outputs // block[0]), -(-inputs // block[1]))
    if block != (1, 1) and stated == blocks:
        return BlockFp8Weight(numbers, tensors.take(name, SCALES, *blocks).float(), block)
    if math.prod(stated) not in (1, outputs):
        raise ModelError(f"{name} is {list(stated)}; supported are one scale, one per output, and one per stated block")
    scales = tensors.take(name, SCALES, *stated).float().reshape(-1).expand(outputs).contiguous()
    if tensors.has(f"{module}.{ZEROS}"):
        zeros = tensors.take(f"{module}.{ZEROS}", CODES, *tensors.shape(f"{module}.{ZEROS}")).float().view(-1, 1)
        return PlainWeight(((numbers.float() - zeros) * scales[:, None]).to(dtype))
    return (Int8Weight if numbers.dtype == torch.int8 else Fp8Weight)(numbers, scales)


def _packed(tensors: StoredTensors, module: str, outputs: int, inputs: int, dtype: torch.dtype) -> Weight:
    """Read codes that are packed into 32-bit words along the inputs, with scales per group. Raises: ModelError."""
    if tensors.has(f"{module}.{GLOBAL_SCALE}") or 2 * tensors.shape(f"{module}.{PACKED}")[1] == inputs:
        return PlainWeight(_fp4(tensors, module, outputs, inputs).to(dtype))
    words = tensors.shape(f"{module}.{PACKED}")[1]
    groups = tensors.shape(f"{module}.{SCALE}")[1]
    bits = 32 * words // inputs if inputs else 0
    if bits not in (4, 8) or words * 32 != bits * inputs or not groups or inputs % groups:
        raise ModelError(f"{module}: {inputs} inputs in {words} words and {groups} groups are not codes of 4 or 8 bits")
    codes = _unpacked(tensors.take(f"{module}.{PACKED}", (torch.int32,), outputs, words), bits)
    scales = tensors.take(f"{module}.{SCALE}", FLOATS, outputs, groups)
    middle = 1 << (bits - 1)
    zeros = torch.full_like(scales, middle, dtype=torch.uint8)
    if tensors.has(f"{module}.{ZEROS}"):
        stored = tensors.take(f"{module}.{ZEROS}", (torch.int32,), -(-outputs * bits // 32), groups)
        zeros = _unpacked(stored.T, bits).T[:outputs].contiguous()
    order = column_order(tensors, f"{module}.weight_g_idx", inputs, groups)
    if order is not None:
        codes = codes[:, order]
    if bits == 4:
        return Int4Weight(codes, scales, zeros * ZERO_PARTS, order)
    numbers = (codes.float().unflatten(1, (groups, -1)) - zeros[..., None].float()) * scales[..., None].float()
    spelled_out = numbers.flatten(1)
    if order is not None:
        spelled_out = torch.empty_like(spelled_out).index_copy_(1, order, spelled_out)
    return PlainWeight(spelled_out.to(dtype))


def _fp4(tensors: StoredTensors, module: str, outputs: int, inputs: int) -> torch.Tensor:
    """Dequantise E2M1 codes to float32: NVFP4 with E4M3 scales and one scale of these, or MXFP4 with exponents."""
    codes = f"{module}.{PACKED}" if tensors.has(f"{module}.{PACKED}") else f"{module}.weight"
    stored = tensors.take(codes, (torch.uint8,), outputs, inputs // 2)
    groups = tensors.shape(f"{module}.{SCALE}")[1]
    scales = tensors.take(f"{module}.{SCALE}", (torch.float8_e4m3fn, torch.uint8), outputs, groups)
    if scales.dtype == torch.uint8:
        factors = torch.ldexp(torch.ones(scales.shape, device=scales.device), scales.int() - EXPONENT_BIAS)
    elif tensors.has(f"{module}.{SECOND_SCALE}"):
        second = tensors.take(f"{module}.{SECOND_SCALE}", FLOATS, *tensors.shape(f"{module}.{SECOND_SCALE}"))
        factors = scales.float() * second.float()
    else:
        factors = scales.float() / tensors.take(f"{module}.{GLOBAL_SCALE}", (torch.float32,), 1)
    numbers = torch.tensor(E2M1, device=stored.device)[torch.stack((stored & 15, stored >> 4), dim=-1).flatten(1).int()]
    scaled: torch.Tensor = (numbers.unflatten(1, (groups, -1)) * factors[..., None]).flatten(1)
    return scaled


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack int32 `[rows, words]` to uint8 codes `[rows, words * 32 / bits]`, the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(1)


def _bitsandbytes(tensors: StoredTensors, module: str, outputs: int, inputs: int) -> torch.Tensor:
    """Dequantise 4-bit codes of bitsandbytes to float32 `[outputs, inputs]`. Raises: ModelError."""
    kind = next((each for each in ("nf4", "fp4") if tensors.has(f"{module}.{BNB_STATE}{each}")), None)
    if kind is None:
        raise ModelError(f"{module}: 4-bit weights of bitsandbytes without {BNB_STATE}nf4 or fp4")
    name = f"{module}.{BNB_STATE}{kind}"
    state = json.loads(bytes(tensors.read(name, (torch.uint8,), *tensors.shape(name)).tolist()))
    codes = tensors.take(f"{module}.weight", (torch.uint8,), outputs * inputs // 2, 1).flatten()
    table = tensors.take(f"{module}.weight.quant_map", (torch.float32,), 16)
    blocks = outputs * inputs // int(state["blocksize"])
    absmax = _absmax(tensors, module, blocks, state)
    numbers = table[torch.stack((codes >> 4, codes & 15), dim=1).flatten().int()]
    return (numbers.view(blocks, -1) * absmax[:, None]).view(outputs, inputs)


def _absmax(tensors: StoredTensors, module: str, blocks: int, state: dict[str, object]) -> torch.Tensor:
    """Return the largest magnitude of each block; with nested quantisation they are 8-bit codes themselves."""
    name = f"{module}.{ABSMAX}"
    if not tensors.has(f"{module}.weight.nested_absmax"):
        return tensors.take(name, (torch.float32,), blocks)
    codes = tensors.take(name, (torch.uint8,), blocks)
    table = tensors.take(f"{module}.weight.nested_quant_map", (torch.float32,), 256)
    size = int(str(state["nested_blocksize"]))
    scales = tensors.take(f"{module}.weight.nested_absmax", (torch.float32,), -(-blocks // size))
    offset = float(str(state["nested_offset"]))
    return table[codes.int()] * scales.repeat_interleave(size)[:blocks] + offset
