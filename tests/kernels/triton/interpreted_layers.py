"""The Triton kernels beside attention: norms, gate, what writes the pool, copies."""

import pytest
import torch

from baton.engine.kv_cache.layout import KvLayout
from baton.kernels import reference
from baton.kernels.attention import paged_decode
from baton.kernels.dispatch import on_the_interpreter
from baton.kernels.linear import takes_fused
from baton.kernels.norms import add_rms_norm, gate_mul, rms_norm
from baton.kernels.pages import copy_blocks, gather_blocks, rotate_and_store, scatter_blocks, store_kv
from baton.kernels.triton.few_rows import fused_call
from baton.kernels.triton.launch import FEW_ROWS, INTERPRETED, Device, FewRows
from baton.kernels.triton.pages import store_call
from baton.kernels.types import QUANTISED, DecodeRows, Gate, HeadNorms, KvLayer, QuantisedWeight, Scoring, quantise
from tests.kernels.triton.paged_pool import POISON, PagedPool

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
POOLS = [(dtype, dtype) for dtype in FLOATS] + [(dtype, torch.bfloat16) for dtype in QUANTISED]
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy meets the poison


@pytest.mark.parametrize("gate", Gate)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_norms_and_gate_equal_the_reference(dtype: torch.dtype, wide: bool, gate: Gate) -> None:
    x, residual = torch.randn(2, 3, 37).to(dtype)
    weight = torch.randn(37).to(torch.float32 if wide else dtype)
    added = residual.clone()
    with on_the_interpreter():
        normal, summed = rms_norm(x, weight, 1e-5), add_rms_norm(x, added, weight, 1e-5)
        gated = gate_mul(x[:, :36], gate)
    close = {"atol": ROUNDING[dtype], "rtol": ROUNDING[dtype]}
    torch.testing.assert_close(normal, reference.rms_norm(x, weight, 1e-5), **close)
    torch.testing.assert_close(added, residual + x, atol=0, rtol=0)
    torch.testing.assert_close(summed, reference.rms_norm(residual + x, weight, 1e-5), **close)
    torch.testing.assert_close(gated, reference.gate_mul(x[:, :36], gate), **close)


def drawn_weight(outputs: int, inputs: int, stored: torch.dtype) -> torch.Tensor | QuantisedWeight:
    numbers = torch.randn(outputs, inputs) / inputs**0.5
    if stored not in QUANTISED:
        return numbers.to(stored)
    data, scales = quantise(numbers, stored)
    return QuantisedWeight(data, scales)


@pytest.mark.parametrize(
    ("stored", "computed", "rows"),
    [
        *((dtype, dtype, 3) for dtype in FLOATS),
        (torch.int8, torch.bfloat16, 3),
        (torch.float8_e4m3fn, torch.float32, 3),
        (torch.bfloat16, torch.bfloat16, 1),
        (torch.int8, torch.bfloat16, 1),
    ],
)
def test_product_with_all_around_it_equals_the_operations_one_by_one(
    stored: torch.dtype, computed: torch.dtype, rows: int
) -> None:
    """Of sizes that are no multiples of a tile; what is not a row's is not written."""
    weight, x = drawn_weight(22, 37, stored), (3 * torch.randn(rows, 37)).to(computed)
    norm, bias = torch.randn(37).to(computed), torch.randn(22).to(computed)
    few = FewRows(4, 256, 16, 4)
    for gate, scale, shift, adds in (
        (Gate.SILU, norm, None, False),
        (Gate.GELU, norm.float(), None, False),
        (Gate.CLAMPED, norm, bias, False),
        (None, None, bias, True),
        (None, norm, bias, False),
    ):
        memory = torch.full((rows + 2, 22 if gate is None else 11), torch.nan, dtype=computed)
        output = memory[1:-1]
        residual = torch.randn(output.shape).to(computed) if adds else None
        if residual is not None:
            output.copy_(residual)
        fused_call(x, weight, shift, scale, 1e-5, gate, output, INTERPRETED, adds, few).start()
        expected = reference.fused_linear(x, weight, shift, scale, 1e-5, gate, residual, adds)
        close = {"atol": 4 * ROUNDING[computed], "rtol": 2 * ROUNDING[computed]}
        torch.testing.assert_close(output, expected, **close)
        assert bool(memory[[0, -1]].isnan().all())


def test_only_few_rows_use_the_fused_product() -> None:
    weight, most = torch.zeros(8, 16), FEW_ROWS[INTERPRETED.row].rows
    with on_the_interpreter():
        assert takes_fused(torch.zeros(most, 16), weight)
        assert not takes_fused(torch.zeros(most + 1, 16), weight)
        assert not takes_fused(torch.zeros(0, 16), weight)
        assert not takes_fused(torch.zeros(1, 8), weight[:, ::2])
    assert not takes_fused(torch.zeros(1, 16), weight), "a CPU has no kernel for it"


@pytest.mark.parametrize(("stored", "computed"), POOLS)
def test_store_equals_the_reference_bit_by_bit_and_writes_nothing_else(
    stored: torch.dtype, computed: torch.dtype
) -> None:
    pool, expected = PagedPool(stored, 3, 5, 20, blocks=6), PagedPool(stored, 3, 5, 20, blocks=6)
    fused = torch.randn(4, 9, 20).to(computed)
    fused[1, 3] = 0
    fused[2, 4, 7] = torch.nan
    _, key, value = fused.split(3, dim=1)
    slots = torch.tensor([29, 0, 13, 6])
    with on_the_interpreter():
        store_kv(pool.layer, key, value, slots)
    store_kv(expected.layer, key, value, slots)
    scaled = pool.layer.scales is not None
    clean = torch.ones(len(pool.raw), dtype=torch.bool)
    if scaled:  # numbers of a row whose scale is NaN may be anything
        mark = PagedPool(stored, 3, 5, 20, blocks=6)
        mark.raw.zero_()
        mark.layer.data.view(torch.uint8)[2, 0, 1, 3] = 1
        clean = mark.raw == 0
    assert torch.equal(pool.raw[clean], expected.raw[clean])
    if scaled:
        assert bool(pool.layer.scales[2, 0, 1, 3].isnan())


@pytest.mark.parametrize(
    ("stored", "computed", "norms", "pairs"),
    [
        (*pool, norms, (6, 4)[(number + turn) % 2])
        for number, pool in enumerate(POOLS)
        for turn, norms in enumerate(("none", "own", "wide"))
    ],
)
def test_rotate_and_store_equals_the_reference(
    stored: torch.dtype, computed: torch.dtype, norms: str, pairs: int
) -> None:
    pool, expected = PagedPool(stored, 3, 4, 12, blocks=5), PagedPool(stored, 3, 4, 12, blocks=5)
    qkv = torch.randn(3, 6 + 2 * 3, 12).to(computed)
    angles = torch.randn(5, pairs)
    cos, sin = angles.cos().to(computed), angles.sin().to(computed)
    query_norm, key_norm = torch.randn(2, 12).to(torch.float32 if norms == "wide" else computed)
    weights = None if norms == "none" else HeadNorms(query_norm, key_norm, 1e-6)
    slots = torch.tensor([17, 2, 9])
    rows = torch.tensor([4, 0, 4])
    with on_the_interpreter():
        query = rotate_and_store(qkv.clone(), cos, sin, weights, pool.layer, slots, rows)
    wanted = reference.rotate_and_store(qkv, cos[rows], sin[rows], weights, expected.layer, slots)
    close = {"atol": 4 * ROUNDING[computed], "rtol": 2 * ROUNDING[computed]}
    torch.testing.assert_close(query, wanted, **close)
    everything = torch.arange(5)
    step = {torch.int8: 0.05, torch.float8_e4m3fn: 0.3, torch.float8_e5m2: 0.6}.get(stored, close["atol"])
    for part in (0, 1):
        found, hoped = (reference.read(each.layer, part, everything, torch.float32) for each in (pool, expected))
        torch.testing.assert_close(found, hoped, atol=step, rtol=close["rtol"], equal_nan=True)
    assert torch.equal(pool.layer.data[4, 1, :, 1].view(torch.uint8), expected.layer.data[4, 1, :, 1].view(torch.uint8))


def test_rows_of_padding_write_nothing() -> None:
    pool = PagedPool(torch.bfloat16, 2, 4, 8, blocks=2)
    qkv = torch.randn(2, 6, 8).bfloat16()
    half = torch.ones(2, 4).bfloat16()
    slots = torch.tensor([-1, -1])
    with on_the_interpreter():
        query = rotate_and_store(qkv, half, half, None, pool.layer, slots)
        store_kv(pool.layer, qkv[:, :2], qkv[:, 2:4], slots)
    assert bool(query.isfinite().all())
    assert bool((pool.raw == POISON).all())


def test_row_of_padding_attends_to_nothing_and_is_zero() -> None:
    pool = PagedPool(torch.float32, 2, 4, 16, blocks=2)
    blocks, _, _ = pool.store(5)
    starts, contexts = torch.tensor([0, 2, 2]), torch.tensor([5, 0])
    with on_the_interpreter():
        result = paged_decode(
            torch.randn(2, 4, 16), pool.layer, DecodeRows(torch.tensor(blocks), starts, contexts), Scoring(0.2)
        )
    assert bool(result[0].isfinite().all())
    assert torch.equal(result[1], torch.zeros(4, 16))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float8_e4m3fn])
def test_pages_are_copied_gathered_and_scattered_byte_for_byte(stored: torch.dtype) -> None:
    pool = PagedPool(stored, 2, 4, 5, blocks=7)
    pool.raw.copy_(torch.randint(0, 256, pool.raw.shape, dtype=torch.uint8))
    before = pool.raw.view(7, -1).clone()
    with on_the_interpreter():
        copy_blocks(pool.pages, torch.tensor([4, 0]), torch.tensor([1, 6]))
    after = pool.raw.view(7, 1, -1)
    assert torch.equal(after[:, 0], before[[0, 4, 2, 3, 4, 5, 0]])
    ids, piece = torch.tensor([5, 2]), torch.zeros(2, 1, after.shape[2], dtype=torch.uint8)
    with on_the_interpreter():
        gather_blocks(after, ids, piece)
        scatter_blocks(piece, after, torch.tensor([0, 3]))
    assert torch.equal(piece, after[[5, 2]])
    assert torch.equal(after[[0, 3]], piece)


def test_some_heads_of_a_block_are_gathered_as_a_rectangle() -> None:
    blocks = torch.randint(0, 256, (6, 3, 4 * 10), dtype=torch.uint8)
    piece = torch.zeros(2, 3, 20, dtype=torch.uint8)
    with on_the_interpreter():
        gather_blocks(blocks[:, :, 10:30], torch.tensor([4, 1]), piece)
    assert torch.equal(piece, blocks[[4, 1], :, 10:30])


def far_layer(dtype: torch.dtype, block: int) -> tuple[KvLayer, torch.Tensor]:
    """A layer whose block `block` lies past 2**31 numbers, and that block; memory is there only where it is touched."""
    layout = KvLayout(1, 1, 4, 16, dtype)
    stride = 2**17
    size = (block * stride + 8192) * dtype.itemsize
    memory = torch.empty(size, dtype=torch.uint8)
    numbers = memory.view(dtype)
    strides = (stride, 64, 64, 16, 1)
    data = numbers.as_strided((block + 1, 2, 1, 4, 16), strides)
    scales = None
    if layout.is_quantised:
        scales = (
            memory[4096:].view(torch.float32)[: block * 32768 + 8].as_strided((block + 1, 2, 1, 4), (32768, 4, 4, 1))
        )
    return KvLayer(data, scales), data[block]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_offsets_past_32_bits_are_right(dtype: torch.dtype) -> None:
    block = 2**14 + 1
    layer, far = far_layer(dtype, block)
    key, value = torch.randn(2, 3, 1, 16).bfloat16()
    with on_the_interpreter():
        store_kv(layer, key, value, torch.arange(3) + 4 * block)
    assert bool((far[:, 0, :3].float() != 0).any(-1).all())
    query, ids = torch.randn(1, 2, 16).bfloat16(), torch.tensor([block])
    arguments = (query, layer, DecodeRows(ids, torch.tensor([0, 1]), torch.tensor([3])), Scoring(0.25))
    with on_the_interpreter():
        result = paged_decode(*arguments)
    torch.testing.assert_close(result, reference.paged_decode(*arguments), atol=0.02, rtol=0.02)
    near = layer.data[:2].clone()
    rows = layer.data.view(torch.uint8).view(block + 1, 2, -1)
    with on_the_interpreter():
        gather_blocks(rows, ids, rows[1:2])
    assert torch.equal(layer.data[1], layer.data[block])
    assert torch.equal(layer.data[0], near[0])


def test_e4m3_is_written_equally_with_and_without_hardware() -> None:
    pools = [PagedPool(torch.float8_e4m3fn, 2, 4, 8, blocks=2) for _ in range(2)]
    key, value = torch.randn(2, 3, 2, 8)
    for pool, device in zip(pools, (Device(80, 1), Device(90, 1)), strict=True):
        store_call(pool.layer, key, value, torch.arange(3), device).start()
    assert torch.equal(pools[0].raw, pools[1].raw)
