"""The native kernels between attentions against the reference: odd sizes, every level, every way to keep weights."""

import os
import random

import pytest
import torch

from baton.engine.kv_cache.layout import KvLayout
from baton.kernels import reference
from baton.kernels.linear import FLOATS, dequantise_weight
from baton.kernels.native.library import NativeLibrary
from baton.kernels.packed_weight import (
    GROUPED,
    PackedWeight,
    Stored,
    pack,
    pack_codes,
    pack_fp4,
    pack_int4,
    pack_int8,
    unpacked,
)
from baton.kernels.types import E2M1, QUANTISED, ZERO_PARTS, Gate, HeadNorms, KvLayer, QuantisedWeight

SHAPES = [(1, 1, 1), (1, 33, 7), (2, 31, 65), (3, 64, 130), (7, 100, 33), (12, 32, 32), (13, 40, 9), (60, 70, 37)]
SHAPES += [(31, 96, 650), (70, 200, 330), (300, 40, 20)]  # many tiles, several stretches of inputs, two blocks
TOLERANCE = 2e-5  # of the largest result
GROUP_INPUTS = 40


def inputs_for(stored: Stored, inputs: int) -> int:
    """As many, or what next is whole groups."""
    return -(-inputs // GROUP_INPUTS) * GROUP_INPUTS if stored in GROUPED else inputs


def weight_of(stored: Stored, outputs: int, inputs: int, bias: bool, group_inputs: int = GROUP_INPUTS) -> PackedWeight:
    offsets = torch.randn(outputs) if bias else None
    if stored is Stored.INT4:
        codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
        zeros = torch.randint(0, 256, (outputs, inputs // group_inputs), dtype=torch.uint8)
        return pack_int4(codes, (torch.rand(zeros.shape) + 0.01).half(), zeros, offsets)
    if stored is Stored.FP4:
        codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
        exponents = torch.randint(-9, 2, (outputs, inputs // group_inputs))
        return pack_fp4(codes, torch.ldexp(torch.ones(exponents.shape), exponents).half(), offsets)
    if stored in (Stored.CODE4, Stored.CODE8):
        return coded(stored, outputs, inputs, group_inputs, offsets, has_offsets=outputs % 2 == 0)
    if stored is not Stored.INT8:
        return pack(torch.randn(outputs, inputs), stored, offsets)
    integers = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
    return pack_int8(integers, torch.rand(outputs) / 127, offsets)


def coded(
    stored: Stored, outputs: int, inputs: int, group_inputs: int, bias: torch.Tensor | None, has_offsets: bool
) -> PackedWeight:
    """Codes with scales of both signs, as in GGUF's Q4_0."""
    if stored is Stored.CODE4:
        codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    else:
        codes = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    groups = (outputs, inputs // group_inputs)
    return pack_codes(codes, torch.randn(groups).half(), torch.randn(groups).half() if has_offsets else None, bias)


def test_packing_loses_nothing() -> None:
    weight = torch.randn(37, 11)
    assert torch.equal(unpacked(pack(weight, Stored.FLOAT32, None)), weight)
    assert torch.equal(unpacked(pack(weight, Stored.BFLOAT16, None)), weight.bfloat16())


@pytest.mark.parametrize("stored", Stored)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SHAPES)
def test_linear_equals_the_reference(
    native: NativeLibrary, stored: Stored, rows: int, outputs: int, inputs: int
) -> None:
    inputs = inputs_for(stored, inputs)
    weight, x = weight_of(stored, outputs, inputs, bias=rows % 2 == 0), torch.randn(rows, inputs)
    expected = reference.packed_linear(x, weight)
    tolerance = TOLERANCE * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(native.packed_linear(x, weight), expected, rtol=0.0, atol=tolerance)


@pytest.mark.parametrize("stored", FLOATS)
def test_head_linear_equals_the_reference_and_ignores_neighbours_and_threads(
    native: NativeLibrary, stored: Stored
) -> None:
    weight, x = pack(torch.randn(3 * 64, 21), stored, None), torch.randn(30, 3, 21)
    whole = native.head_linear(x, weight, 3)
    torch.testing.assert_close(whole, reference.head_linear(x, weight, 3), rtol=0.0, atol=10 * TOLERANCE)
    assert torch.equal(native.head_linear(x[:1], weight, 3), whole[:1])
    torch.set_num_threads(3)
    assert torch.equal(native.head_linear(x, weight, 3), whole)


@pytest.mark.parametrize("stored", Stored)
def test_row_of_linear_does_not_depend_on_its_neighbours_or_on_threads(native: NativeLibrary, stored: Stored) -> None:
    inputs = inputs_for(stored, 75)
    weight, x = weight_of(stored, 200, inputs, bias=True), torch.randn(40, inputs)
    whole = native.packed_linear(x, weight)
    for rows in (1, 2, 5, 12, 27):
        assert torch.equal(native.packed_linear(x[:rows], weight), whole[:rows])
    torch.set_num_threads(3)
    assert torch.equal(native.packed_linear(x, weight), whole)


@pytest.mark.parametrize("gate", Gate)
@pytest.mark.parametrize("stored", Stored)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 64, 33), (9, 128, 40), (50, 34, 17), (300, 192, 70)])
def test_gated_linear_is_the_product_gated(
    native: NativeLibrary, stored: Stored, gate: Gate, rows: int, outputs: int, inputs: int
) -> None:
    inputs = inputs_for(stored, inputs)
    weight, x = weight_of(stored, outputs, inputs, bias=rows % 2 == 0), torch.randn(rows, inputs)
    expected = native.gate_mul(native.packed_linear(x, weight), gate)
    tolerance = 1e-6 * max(1.0, expected.abs().max().item())
    torch.testing.assert_close(native.gated_linear(x, weight, gate), expected, rtol=1e-5, atol=tolerance)


def test_int4_weights_unpack_to_codes_less_zeros_times_scales() -> None:
    codes = torch.randint(0, 16, (37, 48), dtype=torch.uint8)
    zeros, scales = torch.randint(0, 256, (37, 3), dtype=torch.uint8), torch.rand(37, 3).half()
    expected = ((codes.view(37, 3, 16).float() - zeros[..., None] / ZERO_PARTS) * scales[..., None].float()).view(
        37, 48
    )
    assert torch.equal(unpacked(pack_int4(codes, scales, zeros, None)), expected)


def test_fp4_weights_unpack_to_twice_the_numbers_of_their_codes_times_scales() -> None:
    codes = torch.randint(0, 16, (37, 64), dtype=torch.uint8)
    codes[0, :16] = torch.arange(16)
    scales = torch.tensor([0.5, 4.0]).half().expand(37, 2)
    expected = dequantise_weight(QuantisedWeight(codes[:, :32] | codes[:, 32:] << 4, 2 * scales), torch.float32)
    assert torch.equal(unpacked(pack_fp4(codes, scales, None)), expected)
    assert expected[0, :16].tolist() == list(E2M1)


@pytest.mark.parametrize("has_offsets", [False, True])
@pytest.mark.parametrize("stored", [Stored.CODE4, Stored.CODE8])
def test_codes_unpack_to_their_scale_times_the_code_plus_the_offset(stored: Stored, has_offsets: bool) -> None:
    low, high = (0, 16) if stored is Stored.CODE4 else (-128, 128)
    codes = torch.randint(low, high, (37, 48)).to(torch.uint8 if stored is Stored.CODE4 else torch.int8)
    scales, offsets = torch.randn(37, 3).half(), torch.randn(37, 3).half()
    expected = codes.view(37, 3, 16).float() * scales[..., None].float()
    expected = (expected + offsets[..., None].float() if has_offsets else expected).view(37, 48)
    assert torch.equal(unpacked(pack_codes(codes, scales, offsets if has_offsets else None, None)), expected)


@pytest.mark.parametrize("stored", [Stored.INT4, Stored.CODE4, Stored.CODE8])
@pytest.mark.parametrize("group_inputs", [8, 24, 32, 64, 128, 256])
@pytest.mark.parametrize("rows", [1, 2, 5, 40])
def test_groups_have_any_size(native: NativeLibrary, rows: int, group_inputs: int, stored: Stored) -> None:
    weight, x = weight_of(stored, 70, 768, False, group_inputs), torch.randn(rows, 768)
    expected = reference.packed_linear(x, weight)
    tolerance = TOLERANCE * expected.abs().max().item()
    torch.testing.assert_close(native.packed_linear(x, weight), expected, rtol=0.0, atol=tolerance)


def test_large_int4_input_coarsens_only_its_group(native: NativeLibrary) -> None:
    weight, x = weight_of(Stored.INT4, 50, 4 * GROUP_INPUTS, bias=False), torch.randn(3, 4 * GROUP_INPUTS)
    expected = x @ unpacked(weight).T
    x[:, 0], column = 1000.0, unpacked(weight)[:, 0]
    x[:, 1:GROUP_INPUTS] = 0.0
    found = native.packed_linear(x, weight) - 1000.0 * column
    rest = x[:, GROUP_INPUTS:] @ unpacked(weight)[:, GROUP_INPUTS:].T
    assert (found - rest).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.parametrize("stored", [Stored.CODE4, Stored.CODE8])
def test_large_input_of_codes_leaves_other_groups_exact(native: NativeLibrary, stored: Stored) -> None:
    weight, x = weight_of(stored, 50, 4 * GROUP_INPUTS, bias=False), torch.randn(3, 4 * GROUP_INPUTS)
    x[:, 0], x[:, 1:GROUP_INPUTS] = 1000.0, 0.0
    numbers = unpacked(weight).double()
    rest = x[:, GROUP_INPUTS:].double() @ numbers[:, GROUP_INPUTS:].T
    found = native.packed_linear(x, weight) - 1000.0 * numbers[:, 0]
    assert (found - rest).abs().max() < 2e-4 * rest.abs().max()


@pytest.mark.parametrize(("stored", "code"), [(Stored.CODE4, 15), (Stored.CODE8, -128), (Stored.CODE8, 127)])
@pytest.mark.parametrize("rows", [1, 40])
def test_sums_of_codes_in_the_largest_groups_fit_in_32_bits(
    native: NativeLibrary, rows: int, stored: Stored, code: int
) -> None:
    kind = torch.uint8 if stored is Stored.CODE4 else torch.int8
    weight = pack_codes(torch.full((40, 768), code, dtype=kind), torch.ones(40, 3).half(), None, None)
    expected = torch.full((rows, 40), 768.0 * code)
    torch.testing.assert_close(native.packed_linear(torch.ones(rows, 768), weight), expected, rtol=1e-5, atol=0.0)


def test_sums_of_int8_are_the_same_at_every_level(native: NativeLibrary) -> None:
    """Use inputs that are integers already, the largest of which is 32767, so that rounding changes nothing."""
    weight = weight_of(Stored.INT8, 70, 500, bias=False)
    x = torch.randint(-32767, 32768, (40, 500)).float()
    x[:, 3] = 32767.0
    sums = (x.long() @ unpacked(weight).long().T).float()
    assert weight.scales is not None
    assert torch.equal(native.packed_linear(x, weight), sums * weight.scales[:70])


@pytest.mark.parametrize(("outputs", "inputs"), [(34, 32), (128, 96), (200, 1600)])
def test_int8_as_the_level_rounds_it_equals_the_reference_with_any_rows(
    native: NativeLibrary, outputs: int, inputs: int
) -> None:
    integers = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    integers[0], integers[1] = -128, 127
    weight = pack_int8(
        integers, torch.rand(outputs) / 127, torch.randn(outputs), rounds_to_bytes=native.multiplies_bytes
    )
    x = torch.randn(300, inputs)
    x[3], x[4], x[5, ::2] = 1.0, -1.0, 1000.0
    expected = reference.packed_linear(x, weight)
    tolerance = TOLERANCE * expected.abs().amax(1, keepdim=True)
    whole = native.packed_linear(x, weight)
    assert ((whole - expected).abs() <= tolerance).all()
    for rows in (1, 2, 4, 5, 14, 27):
        assert torch.equal(native.packed_linear(x[:rows], weight), whole[:rows])
    gated, product = native.gated_linear(x, weight, Gate.SILU), native.gate_mul(whole, Gate.SILU)
    torch.testing.assert_close(gated, product, rtol=1e-5, atol=1e-6 * expected.abs().max().item())


def test_int8_as_the_level_rounds_it_shows_a_nonfinite_input_only_in_its_row(native: NativeLibrary) -> None:
    weight = pack_int8(
        torch.randint(-127, 128, (40, 64), dtype=torch.int8),
        torch.ones(40),
        None,
        rounds_to_bytes=native.multiplies_bytes,
    )
    x = torch.randn(3, 64)
    clean = native.packed_linear(x, weight)
    x[1, 40] = torch.nan
    found = native.packed_linear(x, weight)
    assert not found[1].isfinite().any()
    assert torch.equal(found[::2], clean[::2])


@pytest.mark.parametrize("integer", [-128, 127])
@pytest.mark.parametrize("rows", [1, 40])
def test_sums_of_int8_with_many_large_inputs_fit_in_32_bits(native: NativeLibrary, rows: int, integer: int) -> None:
    weight = pack_int8(torch.full((40, 5000), integer, dtype=torch.int8), torch.ones(40), None)
    expected = torch.full((rows, 40), 5000.0 * integer)
    torch.testing.assert_close(native.packed_linear(torch.ones(rows, 5000), weight), expected, rtol=1e-3, atol=0.0)


def test_large_input_of_int8_leaves_other_inputs_exact_to_a_thousandth(native: NativeLibrary) -> None:
    weight, x = weight_of(Stored.INT8, 50, 600, bias=False), torch.randn(5, 600)
    assert weight.scales is not None
    numbers = unpacked(weight).double() * weight.scales[:50, None]
    x[:, 0] = 30.0
    expected = x.double() @ numbers.T
    rest = expected - 30.0 * numbers[:, 0]
    assert (native.packed_linear(x, weight) - expected).abs().max() < 1e-3 * rest.abs().max()


@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf])
@pytest.mark.parametrize("stored", Stored)
def test_nonfinite_input_shows_only_in_its_row_of_linear(native: NativeLibrary, stored: Stored, spoilt: float) -> None:
    inputs = inputs_for(stored, 10)
    weight, x = weight_of(stored, 40, inputs, bias=False), torch.randn(3, inputs)
    clean = native.packed_linear(x, weight)
    x[1, 4] = spoilt
    found = native.packed_linear(x, weight)
    assert not found[1].isfinite().any()
    assert torch.equal(found[::2], clean[::2])


@pytest.mark.parametrize("shape", [(1, 1), (3, 63), (5, 2, 33), (2, 576)])
def test_rms_norm_equals_the_reference(native: NativeLibrary, shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape), torch.randn(shape[-1])
    torch.testing.assert_close(native.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("size", [1, 31, 64, 100])
def test_gate_mul_equals_the_reference(native: NativeLibrary, size: int) -> None:
    gate_up = torch.randn(5, 2 * size) * 30
    for gate in Gate:
        expected = reference.gate_mul(gate_up.double(), gate).float()
        torch.testing.assert_close(native.gate_mul(gate_up, gate), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [Gate.SILU, Gate.GELU])
def test_gates_of_huge_numbers_are_zero_or_the_number(native: NativeLibrary, kind: Gate) -> None:
    gate = torch.tensor([-1e30, -200.0, -88.5, 88.5, 200.0, 1e30]).repeat(8)
    gated = native.gate_mul(torch.cat((gate, torch.ones(48)))[None], kind)
    torch.testing.assert_close(gated[0], gate.clamp(min=0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", range(20))
def test_rotate_and_store_equals_the_reference_and_writes_nothing_else(native: NativeLibrary, case: int) -> None:
    draw = random.Random(case)
    kv_heads, head_dim, block_tokens = draw.choice([1, 2, 3]), draw.choice([2, 10, 32, 64]), draw.choice([1, 5, 32])
    heads, tokens, blocks = kv_heads * draw.choice([1, 3]), draw.choice([1, 4, 9]), 12
    dtype = draw.choice([torch.float32, torch.bfloat16])
    norms = draw.choice([None, HeadNorms(torch.rand(head_dim), torch.rand(head_dim), 1e-6)])
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim)
    angles = torch.randn(tokens, draw.choice([1, 2, 4]) * head_dim // 8 or 1)
    slots = torch.randperm(blocks * block_tokens)[:tokens]
    pools = [torch.full((blocks, 3, 2, kv_heads, block_tokens, head_dim), torch.nan, dtype=dtype) for _ in range(2)]
    queries = [
        rotate_and_store(qkv.clone(), angles.cos(), angles.sin(), norms, KvLayer(pool[:, 1], None), slots)
        for rotate_and_store, pool in zip((native.rotate_and_store, reference.rotate_and_store), pools, strict=True)
    ]
    torch.testing.assert_close(*queries)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(*pools, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
@pytest.mark.parametrize("head_dim", [4, 20, 64])
def test_stored_bytes_and_scales_are_the_references(native: NativeLibrary, dtype: torch.dtype, head_dim: int) -> None:
    """Where nothing is rotated they are equal bit by bit; magnitudes go from none to the largest, and beyond."""
    tokens, layout = 60, KvLayout(2, 2, 8, head_dim, dtype)
    qkv = torch.randn(tokens, 6, head_dim) * 10.0 ** torch.randint(-44, 38, (tokens, 6, 1))
    qkv *= 10.0 ** torch.randint(-6, 1, qkv.shape)  # within a row too: numbers of the format that are not normal
    qkv[7] = 0.0
    angles, slots = torch.zeros(tokens, head_dim // 2), torch.randperm(80)[:tokens]
    storages = [torch.full((10 * layout.block_bytes,), 0xFF, dtype=torch.uint8) for _ in range(2)]
    for storage, rotate_and_store in zip(storages, (native.rotate_and_store, reference.rotate_and_store), strict=True):
        kv = layout.view(storage, 10).layer(1)
        rotate_and_store(qkv.clone(), angles.cos(), angles.sin(), None, kv, slots)
    assert torch.equal(*storages)


@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
def test_nonfinite_row_gets_a_nonfinite_scale(native: NativeLibrary, dtype: torch.dtype) -> None:
    layout, angles = KvLayout(1, 1, 4, 16, dtype), torch.zeros(3, 8)
    kv = layout.view(torch.zeros(layout.block_bytes, dtype=torch.uint8), 1).layer(0)
    qkv = torch.randn(3, 3, 16)
    qkv[0, 1, 3], qkv[2, 2, 0] = torch.nan, -torch.inf
    native.rotate_and_store(qkv, angles.cos(), angles.sin(), None, kv, torch.arange(3))
    assert kv.scales is not None
    assert kv.scales[0, :, 0, :3].isfinite().tolist() == [[False, True, True], [True, True, False]]


def test_forked_child_uses_its_own_threads(native: NativeLibrary) -> None:
    weight, x = weight_of(Stored.FLOAT32, 300, 40, bias=False), torch.randn(5, 40)
    torch.set_num_threads(2)
    expected = native.packed_linear(x, weight)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(native.packed_linear(x, weight), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
