"""KV in one byte per number: how exact it is, what is written, and attention over it against a dense computation."""

import pytest
import torch

from baton.engine.kv_cache.layout import KvLayout
from baton.kernels.attention import paged_decode, paged_prefill
from baton.kernels.libraries.gathered import gathered_prefill
from baton.kernels.pages import copy_blocks, store_kv
from baton.kernels.types import LARGEST, QUANTISED, DecodeRows, KvLayer, KvPages, Scoring, dequantise, quantise

BLOCKS, LAYERS, KV_HEADS, BLOCK_TOKENS, HEAD_DIM, HEADS = 12, 3, 2, 4, 17, 6
SCORING = Scoring(HEAD_DIM**-0.5)
POISON = 0xFF  # NaN as a scale
# Largest error of a number, as a share of its magnitude and of its row's scale: half a step of the format.
ERROR = {
    torch.float8_e4m3fn: (2.0**-4, 2.0**-10),
    torch.float8_e5m2: (2.0**-3, 2.0**-17),
    torch.int8: (0.0, 0.5),
}


@pytest.fixture(params=QUANTISED, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    torch.manual_seed(0)
    found: torch.dtype = request.param
    return found


def poisoned(dtype: torch.dtype) -> tuple[torch.Tensor, KvPages]:
    """Bytes of each block, and the pool over them."""
    layout = KvLayout(LAYERS, KV_HEADS, BLOCK_TOKENS, HEAD_DIM, dtype)
    storage = torch.full((BLOCKS * layout.block_bytes,), POISON, dtype=torch.uint8)
    return storage.view(BLOCKS, -1), layout.view(storage, BLOCKS)


def slots_of(block_ids: list[int], positions: range) -> torch.Tensor:
    return torch.tensor([block_ids[p // BLOCK_TOKENS] * BLOCK_TOKENS + p % BLOCK_TOKENS for p in positions])


def dense_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int) -> torch.Tensor:
    """Causal, in float64. query: `[tokens, heads, head_dim]`; key, value: `[context, kv_heads, head_dim]`."""
    key, value = (t.double().repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * SCORING.scale
    later = torch.arange(len(key)) > torch.arange(start, start + len(query))[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), value)


def as_stored(kv: KvLayer, block_ids: list[int], tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, each `[tokens, kv_heads, head_dim]`, read number by number."""
    assert kv.scales is not None
    found = torch.empty(2, tokens, KV_HEADS, HEAD_DIM)
    for position in range(tokens):
        block, offset = block_ids[position // BLOCK_TOKENS], position % BLOCK_TOKENS
        for part in (0, 1):
            for head in range(KV_HEADS):
                scale = float(kv.scales[block, part, head, offset])
                found[part, position, head] = kv.data[block, part, head, offset].float() * scale
    return found[0], found[1]


@pytest.mark.parametrize("magnitude", [1e-30, 1e-3, 1.0, 1e30])
def test_error_of_a_number_is_half_a_step(dtype: torch.dtype, magnitude: float) -> None:
    rows = torch.randn(500, 3, 64) * magnitude
    stored, scales = quantise(rows, dtype)
    of_number, of_scale = ERROR[dtype]
    bound = (rows.abs() * of_number).maximum(scales[..., None] * of_scale) * 1.0001
    assert stored.dtype == dtype
    assert bool(((dequantise(stored, scales, torch.float32) - rows).abs() <= bound).all())


def test_largest_number_of_a_row_is_the_largest_of_the_format(dtype: torch.dtype) -> None:
    stored, _ = quantise(torch.randn(100, 64), dtype)
    assert bool((stored.float().abs().amax(-1) == LARGEST[dtype]).all())


@pytest.mark.parametrize("tiny", [0.0, 1e-45, 1e-38])
def test_rows_of_next_to_nothing_read_back_as_finite(dtype: torch.dtype, tiny: float) -> None:
    read = dequantise(*quantise(torch.full((2, 8), tiny), dtype), torch.float32)
    assert bool((read.abs() <= 2 * tiny).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nonfinite_values_stay_visible_and_alone(dtype: torch.dtype, bad: float) -> None:
    rows = torch.randn(3, 8)
    clean = dequantise(*quantise(rows, dtype), torch.float32)
    rows[1, 5] = bad
    read = dequantise(*quantise(rows, dtype), torch.float32)
    assert bool(read[1].isnan().all())
    assert torch.equal(read[[0, 2]], clean[[0, 2]])


def test_store_writes_only_numbers_and_scales_of_its_slots(dtype: torch.dtype) -> None:
    raw, kv = poisoned(dtype)
    key, value = torch.randn(2, 3, KV_HEADS, HEAD_DIM)
    store_kv(kv.layer(1), key, value, slots_of([7, 2], range(2, 5)))
    for found, expected in zip(as_stored(kv.layer(1), [7, 2], 5), (key, value), strict=True):
        assert torch.equal(found[2:], dequantise(*quantise(expected, dtype), torch.float32))
    touched = int((raw != POISON).sum())
    assert int((raw[[7, 2]] != POISON).sum()) == touched
    row_bytes = HEAD_DIM + 4
    assert 0 < touched <= 3 * 2 * KV_HEADS * row_bytes


def test_chunks_are_stored_as_the_whole_is_bit_by_bit(dtype: torch.dtype) -> None:
    (whole, one), (cut, other) = poisoned(dtype), poisoned(dtype)
    key, value = torch.randn(2, 11, KV_HEADS, HEAD_DIM)
    blocks = [3, 8, 5]
    store_kv(one.layer(0), key, value, slots_of(blocks, range(11)))
    for part in (range(6), range(6, 7), range(7, 11)):
        chosen = slice(part.start, part.stop)
        store_kv(other.layer(0), key[chosen], value[chosen], slots_of(blocks, part))
    assert torch.equal(whole, cut)


def test_attention_over_gathered_numbers_refuses_it(dtype: torch.dtype) -> None:
    layer = poisoned(dtype)[1].layer(0)
    with pytest.raises(ValueError, match="quantised KV"):
        gathered_prefill(torch.zeros(2, HEADS, HEAD_DIM), layer, torch.tensor([3]), 0, SCORING)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("start", "tokens"), [(0, 1), (0, 11), (3, 2), (8, 6)])
def test_prefill_equals_attention_over_the_stored_numbers(
    dtype: torch.dtype, start: int, tokens: int, compute: torch.dtype
) -> None:
    kv, blocks = poisoned(dtype)[1].layer(2), [9, 0, 4, 6][: -(-(start + tokens) // BLOCK_TOKENS)]
    key, value = torch.randn(2, start + tokens, KV_HEADS, HEAD_DIM).to(compute)
    store_kv(kv, key, value, slots_of(blocks, range(start + tokens)))
    query = torch.randn(tokens, HEADS, HEAD_DIM).to(compute)
    result = paged_prefill(query, kv, torch.tensor(blocks), start, SCORING)
    expected = dense_attention(query, *as_stored(kv, blocks, start + tokens), start)
    assert result.dtype == compute
    torch.testing.assert_close(result.double(), expected, atol=1e-5 if compute == torch.float32 else 0.03, rtol=0)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_decode_equals_attention_over_the_stored_numbers(dtype: torch.dtype, compute: torch.dtype) -> None:
    kv, contexts, tables = poisoned(dtype)[1].layer(2), [1, 10, 4], [[9], [0, 4, 6], [11]]
    for context, blocks in zip(contexts, tables, strict=True):
        key, value = torch.randn(2, context, KV_HEADS, HEAD_DIM).to(compute)
        store_kv(kv, key, value, slots_of(blocks, range(context)))
    query = torch.randn(3, HEADS, HEAD_DIM).to(compute)
    starts = torch.tensor([0, 1, 4, 5])
    result = paged_decode(
        query, kv, DecodeRows(torch.tensor([9, 0, 4, 6, 11]), starts, torch.tensor(contexts)), SCORING
    )
    for row, (context, blocks) in enumerate(zip(contexts, tables, strict=True)):
        expected = dense_attention(query[row : row + 1], *as_stored(kv, blocks, context), context - 1)
        atol = 1e-5 if compute == torch.float32 else 0.03
        torch.testing.assert_close(result[row : row + 1].double(), expected, atol=atol, rtol=0)


def test_attention_stays_near_that_over_unquantised_kv(dtype: torch.dtype) -> None:
    kv, blocks = poisoned(dtype)[1].layer(0), list(range(10))
    key, value = torch.randn(2, 40, KV_HEADS, HEAD_DIM)
    store_kv(kv, key, value, slots_of(blocks, range(40)))
    query = torch.randn(40, HEADS, HEAD_DIM)
    result = paged_prefill(query, kv, torch.tensor(blocks), 0, SCORING)
    expected = dense_attention(query, key, value, 0)
    bound = {torch.float8_e4m3fn: 0.05, torch.float8_e5m2: 0.1, torch.int8: 0.02}[dtype]
    assert float((result.double() - expected).norm() / expected.norm()) < bound


def test_poison_past_the_context_and_in_other_blocks_is_not_read(dtype: torch.dtype) -> None:
    _, kv = poisoned(dtype)
    key, value = torch.randn(2, 6, KV_HEADS, HEAD_DIM)
    store_kv(kv.layer(0), key, value, slots_of([1, 2], range(6)))
    query = torch.randn(1, HEADS, HEAD_DIM)
    ids, starts = torch.tensor([1, 2]), torch.tensor([0, 2])
    assert bool(paged_decode(query, kv.layer(0), DecodeRows(ids, starts, torch.tensor([6])), SCORING).isfinite().all())
    assert bool(paged_decode(query, kv.layer(0), DecodeRows(ids, starts, torch.tensor([7])), SCORING).isnan().all())


def test_copied_blocks_have_the_same_bytes_scales_and_all(dtype: torch.dtype) -> None:
    raw, kv = poisoned(dtype)
    raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8))
    before = raw.clone()
    copy_blocks(kv, torch.tensor([4, 0]), torch.tensor([1, 6]))
    assert torch.equal(raw, before[[0, 4, 2, 3, 4, 5, 0, 7, 8, 9, 10, 11]])


def test_scales_go_with_quantised_numbers_and_with_no_others() -> None:
    _, kv = poisoned(torch.int8)
    assert kv.scales is not None
    with pytest.raises(ValueError, match="must have scales"):
        KvPages(kv.data)
    with pytest.raises(ValueError, match="must not have scales"):
        KvPages(kv.data.float(), kv.scales)
    with pytest.raises(ValueError, match="scales must be"):
        KvPages(kv.data, kv.scales[1:])
