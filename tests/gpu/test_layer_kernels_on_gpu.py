"""What stands beside attention, on the device: against float64 where numbers are computed, bit by bit where stored."""

import pytest
import torch

from baton.kernels import reference
from baton.kernels.linear import fused_linear
from baton.kernels.norms import add_rms_norm, gate_mul, rms_norm
from baton.kernels.pages import copy_blocks, gather_blocks, rotate_and_store, scatter_blocks
from baton.kernels.sampling import sample_tokens
from baton.kernels.types import QUANTISED, Gate, HeadNorms, KvLayer, KvPages
from tests.fixtures.sampled import by_reference
from tests.gpu.device import CUDA, needs_gpu
from tests.kernels.triton.paged_pool import PagedPool

pytestmark = needs_gpu
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}


@pytest.mark.parametrize("size", [1, 37, 1024, 4096])
@pytest.mark.parametrize("dtype", ROUNDING)
def test_norms_and_gate(dtype: torch.dtype, size: int) -> None:
    x, residual = torch.randn(2, 5, size).to(dtype)
    weight, gate_up = torch.randn(size).to(dtype), torch.randn(5, 2 * size).to(dtype)
    added = residual.to(CUDA, copy=True)
    found = (
        rms_norm(x.to(CUDA), weight.to(CUDA), 1e-5),
        add_rms_norm(x.to(CUDA), added, weight.to(CUDA), 1e-5),
        gate_mul(gate_up.to(CUDA)),
    )
    expected = (
        reference.rms_norm(x.double(), weight.double(), 1e-5),
        reference.rms_norm((x + residual).double(), weight.double(), 1e-5),
        reference.gate_mul(gate_up.double()),
    )
    assert added.cpu().equal(x + residual)
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.cpu().double(), exact, atol=2 * ROUNDING[dtype], rtol=2 * ROUNDING[dtype])


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize(("inputs", "outputs"), [(1024, 6144), (3072, 1024), (4096, 50), (130, 64)])
@pytest.mark.parametrize("dtype", ROUNDING)
def test_product_with_all_around_it(dtype: torch.dtype, inputs: int, outputs: int, rows: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, inputs).to(dtype), (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
    norm, residual = torch.randn(inputs).to(dtype), torch.randn(rows, outputs).to(dtype)
    added = residual.to(CUDA, copy=True)
    gated = fused_linear(x.to(CUDA), weight.to(CUDA), None, norm.to(CUDA), 1e-5, gate=Gate.SILU)
    fused_linear(x.to(CUDA), weight.to(CUDA), None, out=added, adds=True)
    expected = reference.fused_linear(x.double(), weight.double(), None, norm.double(), 1e-5, Gate.SILU, None, False)
    close = {"atol": 8 * ROUNDING[dtype], "rtol": 4 * ROUNDING[dtype]}
    torch.testing.assert_close(gated.cpu().double(), expected, **close)
    torch.testing.assert_close(added.cpu().double(), residual.double() + x.double() @ weight.double().T, **close)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("stored", [torch.bfloat16, *QUANTISED])
def test_keys_and_values_go_to_their_slots_and_padding_nowhere(stored: torch.dtype, normed: bool) -> None:
    torch.manual_seed(0)
    ours, theirs = PagedPool(stored, 2, 8, 64, blocks=6), PagedPool(stored, 2, 8, 64, blocks=6)
    norms = HeadNorms(torch.randn(64).bfloat16(), torch.randn(64).bfloat16(), 1e-6) if normed else None
    on_gpu = None if norms is None else HeadNorms(norms.query.to(CUDA), norms.key.to(CUDA), 1e-6)
    qkv, angles = torch.randn(4, 8, 64).bfloat16(), torch.rand(4, 32)
    cos, sin, slots = angles.cos().bfloat16(), angles.sin().bfloat16(), torch.tensor([41, -1, 0, 17])
    scales = ours.layer.scales
    layer = KvLayer(ours.layer.data.to(CUDA), None if scales is None else scales.to(CUDA))
    query = rotate_and_store(qkv.to(CUDA, copy=True), cos.to(CUDA), sin.to(CUDA), on_gpu, layer, slots.to(CUDA)).cpu()
    expected = reference.rotate_and_store(qkv, cos, sin, norms, theirs.layer, slots)
    torch.testing.assert_close(query, expected, atol=0.03, rtol=0.02)
    untouched = torch.ones(6, 8, dtype=torch.bool)
    for slot in (41, 0, 17):
        untouched[slot // 8, slot % 8] = False
        ours_row, row = (each.data[slot // 8, :, :, slot % 8].float() for each in (layer, theirs.layer))
        scale = 1.0 if theirs.layer.scales is None else theirs.layer.scales[slot // 8, :, :, slot % 8, None]
        our_scale = 1.0 if layer.scales is None else layer.scales[slot // 8, :, :, slot % 8, None].cpu()
        torch.testing.assert_close(ours_row.cpu() * our_scale, row * scale, atol=0.06, rtol=0.13)
    raw = layer.data.cpu().view(torch.uint8).transpose(1, 3).transpose(2, 3)
    assert (raw[untouched] == 0xFF).all(), "bytes of other slots were written"


def test_blocks_are_gathered_scattered_and_copied_bit_by_bit() -> None:
    blocks = torch.randint(0, 256, (50, 6, 4096), dtype=torch.uint8)
    on_gpu, ids = blocks.to(CUDA, copy=True), torch.tensor([7, 49, 0, 13])
    piece = torch.empty(4, 6, 2048, dtype=torch.uint8, device=CUDA)
    gather_blocks(on_gpu[:, :, 1024:3072], ids.to(CUDA), piece)
    assert piece.cpu().equal(blocks[ids, :, 1024:3072])
    scatter_blocks(piece, on_gpu[:, :, :2048], torch.tensor([1, 2, 3, 4], device=CUDA))
    assert on_gpu[1:5, :, :2048].cpu().equal(piece.cpu())
    kv = torch.randn(9, 2, 2, 2, 8, 16)
    copied = kv.to(CUDA, copy=True)
    copy_blocks(KvPages(copied), torch.tensor([4, 0], device=CUDA), torch.tensor([1, 8], device=CUDA))
    assert copied.cpu().equal(kv[[0, 4, 2, 3, 4, 5, 6, 7, 0]])


@pytest.mark.parametrize("vocab", [50, 32000, 151936])
def test_sampled_tokens_equal_the_reference(vocab: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(12, vocab) * 4
    temperature = torch.tensor([0.0, 0.7, 1.3] * 4)
    top_k, top_p = torch.tensor([0, 5, 40, 0] * 3), torch.tensor([1.0, 0.9, 0.5, 0.95, 1.0, 0.1] * 2)
    uniform = torch.rand(12, dtype=torch.float64)
    given = (logits, temperature, top_k, top_p, uniform)
    expected, found = by_reference(*given), sample_tokens(*(each.to(CUDA) for each in given))
    assert found.token_ids.cpu().equal(expected.token_ids)
    torch.testing.assert_close(found.logprobs.cpu(), expected.logprobs, atol=1e-4, rtol=1e-4)
