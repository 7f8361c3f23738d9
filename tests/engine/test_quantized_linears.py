"""Weights quantised while loading: how far numbers move, and that every way to compute computes the same."""

import itertools
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine import LLM, SamplingParams
from baton.engine.config.model_config import ModelError
from baton.engine.load import load_model
from baton.engine.models import linear as tiled
from baton.engine.models.linear import (
    FLOAT16_RATIO,
    DenseLinear,
    Int4KernelLinear,
    Linear,
    MatmulBackend,
    reduced,
    spelled_out,
)
from baton.engine.prepare import ModelOptions, PreparedModel, prepare_model
from baton.engine.weights.files import loaded_bytes
from baton.engine.weights.formats import WeightFormat
from baton.engine.weights.weight import (
    FP8_LARGEST,
    GROUP_INPUTS,
    QUANTISERS,
    Int4Weight,
    quantise_fp8,
    quantise_int4,
    quantise_int8,
)
from baton.kernels.types import ZERO_PARTS
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import CPU, PagedModel, random_prompt

LEAVES = (type(None), bool, int, tuple)
MADE = ("int8", "int4", "fp8")
seeds = st.integers(0, 2**32)
spreads = st.sampled_from([1e-4, 0.02, 1.0, 300.0])


def weights(seed: int, spread: float, outputs: int = 48, inputs: int = 96) -> torch.Tensor:
    """With outliers, rows of zeros and rows of one sign, as they come."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(outputs, inputs, generator=generator) * spread
    drawn[0] = 0
    drawn[1] = drawn[1].abs()
    drawn[2, 0] = 40 * spread
    return drawn


def made(format: str, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype = torch.float32) -> Linear:
    return MatmulBackend(CPU, dtype).linear(QUANTISERS[WeightFormat(format)](weight, bias, slice(None)))


def dequantised(format: str, weight: torch.Tensor) -> torch.Tensor:
    """What a linear of this format multiplies with, read off its products with unit vectors."""
    linear = made(format, weight, None)
    return linear(torch.eye(weight.shape[1])).T


@settings(max_examples=30, deadline=None)
@given(seeds, spreads)
def test_int8_moves_a_weight_by_half_a_step_of_its_row(seed: int, spread: float) -> None:
    weight = weights(seed, spread)
    step = quantise_int8(weight, None).scales[:, None]
    assert ((dequantised("int8", weight) - weight).abs() <= step * (0.5 + 1e-4)).all()


@settings(max_examples=30, deadline=None)
@given(seeds, spreads)
def test_int4_moves_a_weight_by_at_most_one_and_a_half_steps_of_its_group(seed: int, spread: float) -> None:
    """Half a step inside the range; at its ends, which a smaller step may clip, more."""
    weight = weights(seed, spread)
    step = quantise_int4(weight).scales.float().repeat_interleave(GROUP_INPUTS, 1)
    assert ((dequantised("int4", weight) - weight).abs() <= step * 1.5).all()


def test_int4_has_a_smaller_error_than_rounding_the_range_of_each_group() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    groups = weight.view(64, -1, GROUP_INPUTS)
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    step = (high - low) / 15
    zero = (-low / step).round()
    rounded = (((groups / step).round() + zero).clamp(0, 15) - zero) * step
    error = (dequantised("int4", weight) - weight).square().mean()
    assert error < 0.94 * (rounded - groups).square().mean()


@settings(max_examples=30, deadline=None)
@given(seeds, spreads)
def test_fp8_keeps_four_significant_bits(seed: int, spread: float) -> None:
    weight = weights(seed, spread)
    step = quantise_fp8(weight).scales.repeat_interleave(GROUP_INPUTS, 1)
    bound = torch.maximum(weight.abs() * 2**-4, step * 2**-10) * (1 + 1e-4)
    assert ((dequantised("fp8", weight) - weight).abs() <= bound).all()


def test_fp8_has_a_smaller_error_than_rounding_with_the_largest_scale_of_each_group() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    groups = weight.view(64, -1, GROUP_INPUTS)
    scales = groups.abs().amax(2, keepdim=True) / FP8_LARGEST
    rounded = (groups / scales).to(torch.float8_e4m3fn).float() * scales
    error = (dequantised("fp8", weight) - weight).square().mean()
    assert error < 0.7 * (rounded - groups).square().mean()


def test_fp8_in_another_unit_has_the_same_numbers() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    one, other = quantise_fp8(weight), quantise_fp8(weight / 1024)
    assert torch.equal(one.numbers.view(torch.uint8), other.numbers.view(torch.uint8))
    assert torch.equal(one.scales, other.scales * 1024)


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_zero_stays_zero(format: str) -> None:
    weight = weights(0, 1.0)
    weight[:, ::7] = 0
    assert (dequantised(format, weight)[weight == 0] == 0).all()


def test_every_finite_fp8_is_reduced_exactly() -> None:
    floats = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = floats[~floats.float().isnan()]
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(reduced(finite, dtype) * FLOAT16_RATIO, finite.to(dtype))


@pytest.mark.parametrize(
    ("format", "rows", "dtype"), itertools.product(MADE, (1, 5, 40), (torch.float32, torch.bfloat16))
)
def test_products_are_those_of_the_dequantised_weight(format: str, rows: int, dtype: torch.dtype) -> None:
    weight, bias = weights(1, 0.05), torch.randn(48).to(dtype)
    linear = made(format, weight, bias, dtype)
    x = torch.randn(rows, 96).to(dtype)
    expected = F.linear(x.float(), dequantised(format, weight), bias.float())
    found = linear(x)
    assert found.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(found.float(), expected, atol=tolerance * expected.abs().max().item(), rtol=0.0)


@pytest.mark.parametrize("format", MADE)
def test_tiles_are_put_together_in_order(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias = weights(2, 0.05, outputs=200), torch.randn(200)
    linear = made(format, weight, bias)
    x = torch.randn(3, 96)
    whole = linear(x)
    monkeypatch.setattr(tiled, "CPU_TILE_NUMBERS", 96 * 64)
    torch.testing.assert_close(linear(x), whole, atol=1e-6, rtol=1e-5)


def test_the_int4_kernel_agrees_with_the_plain_computation() -> None:
    weight = weights(3, 0.05)
    kernel, plain = made("int4", weight, None, torch.bfloat16), made("int4", weight, None)
    assert isinstance(kernel, Int4KernelLinear)
    x = torch.randn(7, 96).bfloat16()
    zeros = quantise_int4(weight).zeros / ZERO_PARTS
    _, offsets = kernel.scales_and_zeros.float().transpose(0, 1).unbind(2)  # rounded to bfloat16, in which it adds
    rounded = (offsets - (8 - zeros) * quantise_int4(weight).scales.float()).repeat_interleave(GROUP_INPUTS, 1)
    expected = plain(x.float()) + x.float() @ rounded.T
    torch.testing.assert_close(kernel(x).float(), expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize(("format", "most"), [("int8", 0.27), ("fp8", 0.29), ("int4", 0.16)])
def test_memory_really_shrinks(format: str, most: float) -> None:
    weight = torch.randn(256, 512)
    linear = made(format, weight, None)
    assert held(linear) < most * weight.nbytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("plain"), "qwen3", hidden_size=128, intermediate_size=256, num_hidden_layers=2
    )


def dense_twin(folder: Path, format: str) -> PagedModel:
    """The plain model with the weights that the format leaves of its own."""
    paged = PagedModel(folder)
    for layer in paged.model.layers:
        linears = (layer.qkv, layer.output, layer.feed_forward.gate_up, layer.feed_forward.down)
        for linear in linears:
            assert isinstance(linear, DenseLinear)
            linear.weight.copy_(dequantised(format, linear.weight))
    return paged


@pytest.mark.parametrize("format", MADE)
def test_a_model_answers_as_its_dequantised_twin(format: str, folder: Path) -> None:
    prompts = [random_prompt(40), random_prompt(9)]
    quantised = PagedModel(folder, quantize=format)
    assert quantised.greedy(prompts, 12, 16) == dense_twin(folder, format).greedy(prompts, 12, 16)


def test_the_head_and_the_embedding_keep_the_models_dtype(folder: Path) -> None:
    model = load_model(folder, torch.float32, CPU, progress=False, quantize="int4")
    assert isinstance(model.head, DenseLinear)
    assert model.embedding.weight.dtype == model.head.weight.dtype == torch.float32


def held(linear: Any) -> int:
    """Bytes of all its tensors, or of its weight's."""
    own = [getattr(linear, field.name) for field in fields(linear)]
    return sum(
        each.nbytes if isinstance(each, torch.Tensor) else held(each) for each in own if not isinstance(each, LEAVES)
    )


def prepared(folder: Path, quantize: str) -> PreparedModel:
    return prepare_model(ModelOptions(folder, CPU, "float32", 16, 1 << 20, None, quantize=quantize))


def test_the_fingerprint_knows_what_weights_were_made(folder: Path) -> None:
    assert len({prepared(folder, format).fingerprint for format in ("none", *MADE)}) == 4


@pytest.mark.parametrize("format", ("none", *MADE))
def test_the_stated_size_is_the_size_in_memory(format: str, folder: Path) -> None:
    model = load_model(folder, torch.float32, CPU, progress=False, quantize=format)
    projections = sum(
        held(linear)
        for layer in model.layers
        for linear in (layer.qkv, layer.output, layer.feed_forward.gate_up, layer.feed_forward.down)
    )
    rest = model.embedding.weight.nbytes + held(model.head)
    stated = loaded_bytes(folder, WeightFormat(format), 4).total
    assert abs(stated - projections - rest) < 0.01 * stated


def test_an_unknown_format_is_named(folder: Path) -> None:
    with pytest.raises(ModelError, match="'int3'; choose one of none, int8"):
        prepared(folder, "int3")


def test_offline_the_format_goes_by_vllms_name(folder: Path) -> None:
    prompt = random_prompt(20)
    llm = LLM(str(folder), quantization="int8", dtype="float32", kv_memory=1 << 20, quiet=True)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert [list(output.outputs[0].token_ids)] == PagedModel(folder, quantize="int8", packed=True).greedy(
        [prompt], 8, 32
    )


def test_offline_a_format_that_is_not_the_checkpoints_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match="stores its weights as none"):
        LLM(str(folder), quantization="awq", quiet=True)
    with pytest.raises(ValueError, match="quantization is 'none'"):
        LLM(str(folder), quantization="none", quiet=True)


def test_a_weight_that_is_spelled_out_is_the_one_that_its_projection_multiplies_with() -> None:
    """Also where its columns are in another order, as in GPTQ's checkpoints."""
    codes, zeros = torch.randint(16, (48, 64), dtype=torch.uint8), torch.randint(256, (48, 2), dtype=torch.uint8)
    scales, backend = torch.rand(48, 2), MatmulBackend(torch.device("cpu"), torch.float32)
    for order in (None, torch.randperm(64)):
        weight, x = Int4Weight(codes, scales, zeros, order), torch.randn(3, 64)
        expected = backend.linear(weight)(x)
        torch.testing.assert_close(x @ spelled_out(weight, torch.float32).T, expected, atol=1e-4, rtol=0)
    with pytest.raises(ModelError, match="Int8Weight cannot be dequantised"):
        spelled_out(quantise_int8(torch.randn(4, 8)), torch.float32)
