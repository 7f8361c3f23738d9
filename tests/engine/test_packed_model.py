"""A model packed for the native kernels against the same model as PyTorch computes it."""

import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.models.decoder import DecoderModel, with_native_layers
from baton.engine.models.feed_forward import Gated
from baton.engine.models.linear import DenseEmbedding, PackedEmbedding, PackedLinear
from baton.engine.prepare import ModelOptions, prepare_model
from baton.engine.request import Chunk
from baton.kernels import reference
from baton.kernels.packed_weight import Stored
from baton.kernels.types import QUANTISED
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import CPU, PagedModel, random_prompt

pytestmark = pytest.mark.usefixtures("native_kernels")
FAMILIES = ["llama", "qwen2", "qwen3", "mistral"]
MIXED = ["mixtral", "qwen3_moe", "gpt_oss", "glm4_moe", "deepseek_v2", "deepseek_v3", "qwen3_next", "qwen3_5_text"]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module", params=[*FAMILIES, *MIXED])
def any_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


def mixed_step(paged: PagedModel) -> list[torch.Tensor]:
    """Two prompts and a single token in one step, then each prompt's next token."""
    prompts = [random_prompt(37), random_prompt(9)]
    tables = [paged.blocks(64) for _ in prompts]
    first = [Chunk(index, prompt, 0, tables[index]) for index, prompt in enumerate(prompts)]
    paged.logits([*first, Chunk(2, [5], 0, paged.blocks(1))])
    return paged.logits([Chunk(index, [7], len(prompt), tables[index]) for index, prompt in enumerate(prompts)])


def model_of(paged: PagedModel) -> DecoderModel:
    assert isinstance(paged.model, DecoderModel)
    return paged.model


def largest_difference(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))


def mean_difference(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    return torch.stack([(a - b).abs().mean() for a, b in zip(one, other, strict=True)]).mean().item()


def test_logits_are_those_of_the_plain_model(any_folder: Path) -> None:
    plain, packed = PagedModel(any_folder), PagedModel(any_folder, packed=True)
    assert model_of(packed).native is not None
    assert largest_difference(mixed_step(plain), mixed_step(packed)) < 1e-4


def test_bfloat16_logits_are_as_near_to_float32_as_pytorchs(any_folder: Path) -> None:
    exact = mixed_step(PagedModel(any_folder))
    plain, packed = (mixed_step(PagedModel(any_folder, dtype=torch.bfloat16, packed=wish)) for wish in (False, True))
    assert mean_difference(packed, exact) < 1.5 * mean_difference(plain, exact)


def test_all_layers_at_once_are_bit_for_bit_the_layers_one_by_one(
    any_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = PagedModel(any_folder, packed=True)
    together = mixed_step(packed)
    native = model_of(packed).native
    assert native is not None and native.takes(packed.kv)
    monkeypatch.setattr("baton.kernels.native.decoder.runs_natively", lambda decoder, kv: False)
    assert largest_difference(together, mixed_step(PagedModel(any_folder, packed=True))) == 0.0


@pytest.mark.parametrize("kv_dtype", QUANTISED)
def test_quantised_kv_stays_within_the_one_call(folder: Path, kv_dtype: torch.dtype) -> None:
    plain, packed = (PagedModel(folder, kv_dtype=kv_dtype, packed=wish) for wish in (False, True))
    native = model_of(packed).native
    assert native is not None and native.takes(packed.kv)
    assert largest_difference(mixed_step(plain), mixed_step(packed)) < 0.05


def test_weights_of_bfloat16_take_two_bytes_in_a_float32_model(tmp_path: Path) -> None:
    model = model_of(PagedModel(make_checkpoint(tmp_path, "llama", dtype="bfloat16"), packed=True))
    layer = model.layers[0]
    assert isinstance(layer.qkv, PackedLinear) and isinstance(model.head, PackedLinear)
    assert layer.qkv.weight.stored is model.head.weight.stored is Stored.BFLOAT16
    assert model.dtype == torch.float32


def test_an_embedding_of_its_own_keeps_two_bytes_in_a_float32_model(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", dtype="bfloat16", tie_word_embeddings=False)
    embedding = model_of(PagedModel(folder, packed=True)).embedding
    assert isinstance(embedding, DenseEmbedding) and embedding.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_tokens_are_looked_up_in_the_head_that_is_the_embedding_too(
    tmp_path: Path, stored: str, dtype: torch.dtype
) -> None:
    folder = make_checkpoint(tmp_path, "llama", dtype=stored, vocab_size=511)
    plain, packed = (model_of(PagedModel(folder, dtype=dtype, packed=wish)) for wish in (False, True))
    assert isinstance(packed.head, PackedLinear) and isinstance(packed.embedding, PackedEmbedding)
    assert packed.embedding.weight is packed.head.weight
    assert packed.device == CPU
    every = torch.arange(511)
    assert torch.equal(packed.embedding(every), plain.embedding(every).float())


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_beside_a_head_of_integers_the_embedding_stays_a_table_of_its_own(tmp_path: Path, quantize: str) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    plain, packed = (model_of(PagedModel(folder, quantize=quantize, packed=wish)) for wish in (False, True))
    assert isinstance(packed.embedding, DenseEmbedding)
    assert torch.equal(packed.embedding(torch.arange(512)), plain.embedding(torch.arange(512)))


@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_stated_size_is_what_a_packed_model_takes(tmp_path: Path, tied: bool, quantize: str, dtype: str) -> None:
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    folder = make_checkpoint(tmp_path, "llama", dtype="bfloat16", tie_word_embeddings=tied, **sizes)
    stated = prepare_model(ModelOptions(folder, CPU, dtype, 16, 1 << 20, None, quantize=quantize))
    model = model_of(PagedModel(folder, dtype=getattr(torch, dtype), quantize=quantize, packed=True))
    looked_up = model.embedding.weight.nbytes if isinstance(model.embedding, DenseEmbedding) else 0
    linears = [model.head]
    for layer in model.layers:
        assert isinstance(layer.feed_forward, Gated)
        linears += [layer.qkv, layer.output, layer.feed_forward.gate_up, layer.feed_forward.down]
    taken = sum(linear.weight.nbytes for linear in linears if isinstance(linear, PackedLinear))
    assert stated.looked_up_bytes == looked_up
    assert abs(stated.weight_bytes - looked_up - taken) < 0.02 * stated.weight_bytes


def test_nothing_of_a_packed_model_holds_its_file_in_memory(folder: Path) -> None:
    models = [PagedModel(folder, dtype=dtype, packed=True) for dtype in (torch.float32, torch.bfloat16)]
    gc.collect()
    assert models and str(folder) not in Path("/proc/self/maps").read_text()


def test_int8_weights_are_kept_as_they_were_quantised(folder: Path) -> None:
    model = model_of(PagedModel(folder, quantize="int8", packed=True))
    assert model.native is not None
    feed_forward = model.layers[0].feed_forward
    assert isinstance(feed_forward, Gated)
    for linear in (feed_forward.down, model.head):
        assert isinstance(linear, PackedLinear) and linear.weight.stored is Stored.INT8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int4_weights_are_multiplied_natively_as_they_were_quantised(folder: Path, dtype: torch.dtype) -> None:
    packed = PagedModel(folder, dtype=dtype, quantize="int4", packed=True)
    assert model_of(packed).native is not None
    qkv = model_of(packed).layers[0].qkv
    assert isinstance(qkv, PackedLinear) and qkv.weight.stored is Stored.INT4
    plain = PagedModel(folder, quantize="int4")
    expected = mixed_step(plain)
    # What differs are an int8 head and inputs of 8 bits, which with these random weights cost about what bfloat16 does.
    assert largest_difference(expected, mixed_step(packed)) < 0.12 * expected[0].abs().max().item()


def test_int4_layers_are_those_of_the_reference_with_inputs_of_8_bits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = mixed_step(PagedModel(folder, quantize="int4", packed=True))
    monkeypatch.setattr("baton.kernels.native.decoder.runs_natively", lambda decoder, kv: False)
    monkeypatch.setattr("baton.engine.models.linear.packed_linear", reference.packed_linear)
    expected = mixed_step(PagedModel(folder, quantize="int4", packed=True))
    assert largest_difference(expected, native) < 0.01 * expected[0].abs().max().item()


def test_a_spoilt_row_leaves_the_others_bit_for_bit(folder: Path) -> None:
    clean, spoilt = PagedModel(folder, packed=True), PagedModel(folder, packed=True)
    chunks = [Chunk(0, [4, 5, 6, 7, 8], 0, clean.blocks(5)), Chunk(1, [3], 0, clean.blocks(1))]
    before = clean.logits(chunks)
    weight = model_of(spoilt).embedding(torch.arange(512))
    weight[3] = torch.nan
    spoilt.model = with_native_layers(replace(model_of(spoilt), embedding=DenseEmbedding(weight)))
    after = spoilt.logits(chunks)
    assert torch.equal(before[0], after[0])
    assert after[1].isnan().all()
