"""A model over a pool of one byte per number: what it changes, and what it must not."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.engine.config.config_file import read_model_config
from baton.engine.config.model_config import ModelError
from baton.engine.kv_cache.layout import KvLayout, kv_layout
from baton.engine.prepare import ModelOptions, prepare_model, resolve_kv_dtype
from baton.engine.request import BlockCopy, Chunk, NonFinite, Plan, Sample
from baton.engine.sampling.params import SamplingParams
from baton.kernels.types import QUANTISED
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import PagedModel, drawn, random_prompt

GREEDY = (Sample(0, SamplingParams(max_tokens=8)),)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("kv_cache_dtype"), "qwen3", seed=2)


@pytest.fixture(scope="module")
def options(checkpoint: Path) -> ModelOptions:
    return ModelOptions(checkpoint, torch.device("cpu"), "float32", 32, 2**20, None)


@pytest.fixture(params=QUANTISED, ids=lambda dtype: str(dtype).removeprefix("torch."))
def paged(checkpoint: Path, request: pytest.FixtureRequest) -> PagedModel:
    return PagedModel(checkpoint, blocks=32, kv_dtype=request.param)


def logits(paged: PagedModel, prompt: list[int], chunk_tokens: int) -> torch.Tensor:
    table = paged.blocks(len(prompt))
    parts = [
        paged.logits([Chunk(0, prompt[start : start + chunk_tokens], start, table)])[0]
        for start in range(0, len(prompt), chunk_tokens)
    ]
    return torch.cat(parts)


def test_logits_stay_near_those_of_float_kv(checkpoint: Path, paged: PagedModel) -> None:
    prompt = random_prompt(80)
    expected = logits(PagedModel(checkpoint), prompt, 80)
    found = logits(paged, prompt, 33)
    bound = {torch.float8_e4m3fn: 0.05, torch.float8_e5m2: 0.1, torch.int8: 0.02}[paged.layout.dtype]
    error = float((found - expected).norm() / expected.norm())
    assert 0 < error < bound


@pytest.mark.parametrize("chunk_tokens", [1, 7, 33])
def test_how_a_prompt_is_cut_does_not_change_the_answer(paged: PagedModel, chunk_tokens: int) -> None:
    prompts = [random_prompt(length, seed=4) for length in (1, 31, 40)]
    assert paged.greedy(prompts, 12, chunk_tokens) == paged.greedy(prompts, 12, chunk_tokens=1000)


def test_copied_block_continues_like_the_shared_one(paged: PagedModel) -> None:
    prompt = random_prompt(20)
    [shared], [copied] = paged.blocks(20), paged.blocks(20)
    paged.runner.run(Plan((Chunk(1, prompt, 0, [shared]),)))
    [expected] = paged.runner.run(Plan((Chunk(1, [7], 20, [shared], GREEDY),)))
    step = Plan((Chunk(1, [7], 20, [copied], GREEDY),), (BlockCopy(shared, copied),))
    [result] = paged.runner.run(step)
    assert drawn(result) == drawn(expected)


@pytest.mark.parametrize("width", [1, 3])
def test_nonfinite_scale_fails_its_sequence_alone(paged: PagedModel, width: int) -> None:
    prompts = [random_prompt(43, seed=seed) for seed in range(2)]
    tables = [paged.blocks(43) for _ in prompts]
    for prompt, table in zip(prompts, tables, strict=True):
        paged.runner.run(Plan((Chunk(0, prompt[:-width], 0, table),)))
    steps = zip(prompts, tables, strict=True)
    plan = Plan(tuple(Chunk(0, prompt[-width:], 43 - width, table, GREEDY) for prompt, table in steps))
    clean = paged.runner.run(plan)
    assert paged.kv.scales is not None
    paged.kv.scales[tables[0][0], 1, 0, 1, 3] = float("nan")
    assert paged.runner.run(plan) == (NonFinite(), clean[1])


def test_row_of_latent_attention_has_one_scale_for_keys_and_values(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "deepseek_v2")
    paged = PagedModel(folder, kv_dtype=torch.int8, packed=True)
    assert paged.layout.token_bytes == 4 * (32 + 16 + 4)  # layers, numbers of a row in a byte each, a scale
    prompts = [random_prompt(length, seed=4) for length in (1, 31, 40)]
    assert paged.greedy(prompts, 6, 7) == paged.greedy(prompts, 6, 1000)


def test_head_is_its_numbers_then_its_scales() -> None:
    layout = KvLayout(num_layers=2, num_kv_heads=3, block_tokens=4, head_dim=5, dtype=torch.int8)
    head_bytes = 4 * 5 + 4 * 4
    assert layout.block_bytes == 2 * 2 * 3 * head_bytes == 4 * layout.token_bytes
    storage = torch.zeros(3 * layout.block_bytes, dtype=torch.uint8)
    kv = layout.view(storage, 3)
    assert kv.scales is not None
    kv.data[1, 1, 0, 2] = 9
    kv.scales[1, 1, 0, 2] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    start = layout.block_bytes + (1 * 2 * 3 + 2) * head_bytes
    assert storage[start : start + 20].tolist() == [9] * 20
    assert storage[start + 20 : start + head_bytes].view(torch.float32).tolist() == [1.0, 2.0, 3.0, 4.0]
    assert int(storage.count_nonzero()) == 20 + int(storage[start + 20 : start + head_bytes].count_nonzero())


def test_scales_that_would_not_be_aligned_are_refused(checkpoint: Path) -> None:
    config = replace(read_model_config(checkpoint), head_dim=6)
    with pytest.raises(ModelError, match="multiple of 4"):
        kv_layout(config, torch.int8, 5)
    assert kv_layout(config, torch.int8, 6).block_bytes % 4 == 0


def test_one_byte_per_number_holds_more_tokens_in_the_same_memory(options: ModelOptions) -> None:
    plain, small = prepare_model(options), prepare_model(replace(options, kv_cache_dtype="int8"))
    head_dim = plain.config.head_dim
    assert small.layout.token_bytes / plain.layout.token_bytes == (head_dim + 4) / (4 * head_dim)
    assert small.total_blocks == options.kv_memory_bytes // small.layout.block_bytes
    assert "in int8" in str(small)


def test_pools_of_different_numbers_never_exchange_blocks(options: ModelOptions) -> None:
    kinds = [replace(options, kv_cache_dtype=name) for name in ("auto", "fp8_e4m3", "fp8_e5m2", "int8")]
    kinds.append(replace(options, dtype="bfloat16", kv_cache_dtype="int8"))
    assert len({prepare_model(kind).fingerprint for kind in kinds}) == len(kinds)
    named = replace(options, kv_cache_dtype="fp8")
    assert prepare_model(named).fingerprint == prepare_model(kinds[1]).fingerprint


def test_names_that_mean_nothing_are_refused() -> None:
    assert resolve_kv_dtype("float32", torch.float32) is torch.float32
    with pytest.raises(ModelError, match="'fp4'; choose auto, float32"):
        resolve_kv_dtype("fp4", torch.float32)
    with pytest.raises(ModelError, match="the compute dtype is float32"):
        resolve_kv_dtype("bfloat16", torch.float32)
