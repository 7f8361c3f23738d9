"""Paged attention on the device against dense attention in float64, at sizes of real models."""

import pytest
import torch

from baton.kernels.attention import paged_decode, paged_prefill, paged_prefills, rotated_decode
from baton.kernels.libraries.flashinfer import FlashInferPrefill, is_installed
from baton.kernels.libraries.gathered import gathered_prefill, is_fast_gathered
from baton.kernels.pages import rotate_and_store
from baton.kernels.types import QUANTISED, DecodeRows, HeadNorms, KvLayer, PrefillChunks, PrefillRows, Scoring
from tests.gpu.device import CUDA, needs_gpu
from tests.kernels.triton.paged_pool import PagedPool, dense_attention

pytestmark = needs_gpu
HEADS, KV_HEADS = 8, 2
SCORINGS = [Scoring(0.09), Scoring(0.09, window=100), Scoring(0.09, softcap=5.0)]
FORMATS = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)]
FORMATS += [(stored, torch.bfloat16) for stored in QUANTISED]
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.02}


def on_device(pool: PagedPool) -> KvLayer:
    scales = pool.layer.scales
    return KvLayer(pool.layer.data.to(CUDA), None if scales is None else scales.to(CUDA))


@pytest.mark.parametrize("scoring", SCORINGS, ids=["plain", "window", "softcap"])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize(("stored", "computed"), FORMATS)
def test_decode(stored: torch.dtype, computed: torch.dtype, head_dim: int, scoring: Scoring) -> None:
    torch.manual_seed(0)
    pool, lengths = PagedPool(stored, KV_HEADS, 32, head_dim), [1, 32, 33, 600]
    held = [pool.store(length) for length in lengths]
    query = torch.randn(len(lengths) + 1, HEADS, head_dim).to(computed)
    starts = torch.tensor([0, *(len(blocks) for blocks, _, _ in held), 0]).cumsum(0).to(CUDA)
    ids = torch.tensor([block for blocks, _, _ in held for block in blocks]).to(CUDA)
    contexts = torch.tensor([*lengths, 0]).to(CUDA)  # the last row is padding
    attended = paged_decode(query.to(CUDA), on_device(pool), DecodeRows(ids, starts, contexts), scoring).cpu()
    for row, (length, (_, key, value)) in enumerate(zip(lengths, held, strict=True)):
        expected = dense_attention(query[row : row + 1], key, value, length - 1, scoring)
        torch.testing.assert_close(attended[row : row + 1].double(), expected, atol=TOLERANCE[computed], rtol=0.02)
    assert not attended[-1].any()


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize(("stored", "computed"), FORMATS)
def test_rotated_decode_is_both_operations_in_one_launch_after_launch(
    stored: torch.dtype, computed: torch.dtype, head_dim: int
) -> None:
    """Of contexts in one part and in many, whose counters are used again and again, as a graph does."""
    torch.manual_seed(0)
    pool, lengths = PagedPool(stored, KV_HEADS, 32, head_dim, blocks=80), [1, 32, 33, 900]
    tables = [pool.store(length)[0] for length in lengths]
    slots = [table[-1] * 32 + (length - 1) % 32 for table, length in zip(tables, lengths, strict=True)]
    starts = torch.tensor([0, *map(len, tables), 0]).cumsum(0).to(CUDA)
    ids = torch.tensor([block for table in tables for block in table]).to(CUDA)
    arrivals = torch.zeros(len(lengths) + 1, KV_HEADS, dtype=torch.int32, device=CUDA).flatten()
    rows = DecodeRows(ids, starts, torch.tensor([*lengths, 0]).to(CUDA), 4096, arrivals)
    angles = torch.rand(1000, head_dim // 2)
    norm = torch.randn(head_dim).to(computed).to(CUDA)
    rotation = (angles.cos().to(computed).to(CUDA), angles.sin().to(computed).to(CUDA), HeadNorms(norm, norm, 1e-6))
    place = (torch.tensor([*slots, -1]).to(CUDA), torch.tensor([*(each - 1 for each in lengths), 0]).to(CUDA))
    ours, theirs = on_device(pool), on_device(pool)
    for _ in range(50):
        qkv = torch.randn(len(lengths) + 1, HEADS + 2 * KV_HEADS, head_dim).to(computed).to(CUDA)
        attended = rotated_decode(qkv, *rotation, ours, *place, rows, SCORINGS[0])
        query = rotate_and_store(qkv, *rotation, theirs, *place)
        expected = paged_decode(query, theirs, rows, SCORINGS[0])
        torch.testing.assert_close(attended, expected, atol=TOLERANCE[computed], rtol=0.02)
        assert not arrivals.any()


@pytest.mark.parametrize("scoring", SCORINGS, ids=["plain", "window", "softcap"])
@pytest.mark.parametrize(("start", "tokens"), [(0, 300), (77, 129), (500, 1)])
@pytest.mark.parametrize(("stored", "computed"), FORMATS)
def test_prefill(stored: torch.dtype, computed: torch.dtype, start: int, tokens: int, scoring: Scoring) -> None:
    torch.manual_seed(0)
    pool = PagedPool(stored, KV_HEADS, 32, 128)
    blocks, key, value = pool.store(start + tokens)
    query = torch.randn(tokens, HEADS, 128).to(computed)
    block_ids = torch.tensor(blocks).to(CUDA)
    attended = paged_prefill(query.to(CUDA), on_device(pool), block_ids, start, scoring).cpu()
    expected = dense_attention(query, key, value, start, scoring)
    torch.testing.assert_close(attended.double(), expected, atol=TOLERANCE[computed], rtol=0.02)


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize(("start", "tokens"), [(0, 300), (77, 129), (500, 1)])
def test_prefill_over_gathered_numbers(start: int, tokens: int, head_dim: int) -> None:
    torch.manual_seed(0)
    pool, scoring = PagedPool(torch.bfloat16, KV_HEADS, 32, head_dim), Scoring(0.09)
    blocks, key, value = pool.store(start + tokens)
    layer = on_device(pool)
    assert is_fast_gathered(HEADS, layer)
    query = torch.randn(tokens, HEADS, head_dim).bfloat16()
    attended = gathered_prefill(query.to(CUDA), layer, torch.tensor(blocks).to(CUDA), start, scoring).cpu()
    expected = dense_attention(query, key, value, start, scoring)
    torch.testing.assert_close(attended.double(), expected, atol=0.02, rtol=0.02)


@pytest.mark.skipif(not (torch.cuda.is_available() and is_installed()), reason="needs a GPU")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_prefill_by_flashinfer(head_dim: int) -> None:
    torch.manual_seed(0)
    pool, scoring, asked = PagedPool(torch.bfloat16, KV_HEADS, 32, head_dim, 60), Scoring(0.09), [(0, 300), (77, 129)]
    held = [pool.store(start + tokens) for start, tokens in asked]
    layer = on_device(pool)
    rows, chunks = [slice(0, 300), slice(300, 429)], []
    for own, (start, _), (blocks, _, _) in zip(rows, asked, held, strict=True):
        chunks.append(PrefillRows(own, start, torch.tensor(blocks).to(CUDA)))
    nothing = torch.zeros(0, dtype=torch.int64, device=CUDA)
    prefills = PrefillChunks(tuple(chunks), nothing, nothing, nothing, nothing, by_library=2)
    query = torch.randn(429, HEADS, head_dim).bfloat16()
    attended = torch.empty_like(query, device=CUDA)
    planned = FlashInferPrefill(HEADS, layer).plan(prefills)
    paged_prefills(query.to(CUDA), layer, planned, scoring, attended)
    for own, (start, _), (_, key, value) in zip(rows, asked, held, strict=True):
        expected = dense_attention(query[own], key, value, start, scoring)
        torch.testing.assert_close(attended[own].cpu().double(), expected, atol=0.02, rtol=0.02)


def test_offsets_into_a_pool_past_2_31_numbers() -> None:
    blocks, head_dim, tokens = 70_000, 128, 40
    data = torch.full((blocks, 2, 2, 8, 32, head_dim), torch.nan, dtype=torch.bfloat16, device=CUDA)
    layer = KvLayer(data[:, 1], None)
    key, value = torch.randn(2, tokens, 8, head_dim).bfloat16()
    ids = [blocks - 1, blocks - 2]
    for position in range(tokens):
        layer.data[ids[position // 32], 0, :, position % 32] = key[position].to(CUDA)
        layer.data[ids[position // 32], 1, :, position % 32] = value[position].to(CUDA)
    query = torch.randn(1, 8, head_dim).bfloat16()
    starts, contexts = torch.tensor([0, 2], device=CUDA), torch.tensor([tokens], device=CUDA)
    scoring = Scoring(head_dim**-0.5)
    attended = paged_decode(
        query.to(CUDA), layer, DecodeRows(torch.tensor(ids, device=CUDA), starts, contexts), scoring
    )
    expected = dense_attention(query, key.double(), value.double(), tokens - 1, scoring)
    torch.testing.assert_close(attended.cpu().double(), expected, atol=0.02, rtol=0.02)
