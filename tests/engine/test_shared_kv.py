"""Gemma 3n and Gemma 4: layers that read the keys and values of others, and layers whose keys differ in shape."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from baton.engine.config.config_file import read_model_config
from baton.engine.config.model_config import DecoderConfig, HeadShape, ModelError
from baton.engine.kv_cache.groups import layer_groups
from baton.engine.kv_cache.layout import kv_layout
from baton.engine.load import check_parallel
from baton.engine.lora.adapters import AdapterSet
from baton.engine.lora.files import read_adapter
from baton.engine.request import Chunk
from tests.fixtures.adapters import make_adapter, merged_model
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import PagedModel, random_prompt, unlikely

WINDOWED, FULL = 2 * 16, 2 * 32  # numbers of a token's keys in a layer: KV heads x head size


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("gemma4"), "gemma4_text")


@pytest.fixture(scope="module")
def gemma3n(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("gemma3n"), "gemma3n_text")


def decoder_config(folder: Path) -> DecoderConfig:
    config = read_model_config(folder)
    assert isinstance(config, DecoderConfig)
    return config


def test_kv_layout_shared_layers_take_no_bytes(gemma4: Path, gemma3n: Path) -> None:
    bytes_of_4 = 2 * 4 * (2 * WINDOWED + FULL)  # keys and values, float32, layers with KV of their own
    assert kv_layout(decoder_config(gemma4), torch.float32, 32).token_bytes == bytes_of_4
    assert kv_layout(decoder_config(gemma3n), torch.float32, 32).token_bytes == 2 * 4 * 4 * WINDOWED


@pytest.mark.parametrize(
    ("windowed", "full", "counts", "groups"),
    [
        (HeadShape(1, 256), HeadShape(1, 512), (12, 3), (1, 2)),  # E2B: a full layer has the room of two others
        (HeadShape(2, 256), HeadShape(2, 512), (20, 4), (1, 2)),  # E4B
        (HeadShape(16, 256), HeadShape(4, 512), (50, 10), (1, 10)),  # 31B: the other way round
    ],
)
def test_layer_groups_layer_of_several_units_is_in_one_group(
    gemma4: Path, windowed: HeadShape, full: HeadShape, counts: tuple[int, int], groups: tuple[int, int]
) -> None:
    config, (short, long) = decoder_config(gemma4), counts
    assert config.gemma is not None
    unit = min(windowed, full, key=lambda shape: shape.numbers)
    kinds = [windowed] * short + [full] * long
    dealt = layer_groups(
        replace(
            config,
            num_layers=len(kinds),
            num_kv_heads=unit.kv_heads,
            head_dim=unit.head_dim,
            sliding_window=(512,) * short + (None,) * long,
            gemma=replace(config.gemma, shapes=tuple(kinds), sources=tuple(range(len(kinds)))),
            max_positions=131072,
        ),
        block_tokens=32,
    )
    assert (dealt.groups.whole, dealt.groups.windowed) == groups
    taken = [
        (place.group, place.place + offset)
        for place, shape in zip(dealt.places, kinds, strict=True)
        for offset in range(shape.numbers // unit.numbers)
    ]
    assert len(set(taken)) == len(taken)
    assert {index for _, index in taken} <= set(range(dealt.layers))
    assert all(place.group < groups[0] for place in dealt.places[short:])


def test_load_projections_of_layers_without_own_kv_are_ignored(gemma4: Path, tmp_path: Path) -> None:
    for path in gemma4.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    surplus = {f"model.layers.5.self_attn.{name}.weight": torch.ones(64, 64) for name in ("k_proj", "v_proj", "k_norm")}
    tensors = {**load_file(gemma4 / "model.safetensors"), **surplus}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert logits(tmp_path).equal(logits(gemma4))
    save_file({**tensors, "model.layers.5.own": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"does not use, among them model\.layers\.5\.own"):
        logits(tmp_path)


@pytest.mark.parametrize("packed", [False, True])
def test_greedy_gemma4_with_experts_equals_transformers(packed: bool, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3}
    fields |= {"moe_intermediate_size": 48, "use_double_wide_mlp": False}
    folder = make_checkpoint(
        tmp_path, "gemma4_text", seed=3, hidden_size_per_layer_input=0, num_kv_shared_layers=0, **fields
    )
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [random_prompt(length, seed=length) for length in (1, 40, 90)]
    answers = PagedModel(folder, packed=packed).greedy(prompts, 30, chunk_tokens=17)
    assert [unlikely(expected, *each) for each in zip(prompts, answers, strict=True)] == [[]] * len(prompts)


def logits(folder: Path) -> torch.Tensor:
    paged = PagedModel(folder)
    [found] = paged.logits([Chunk(0, random_prompt(20), 0, paged.blocks(20))])
    return found


def test_kv_layout_quantised_keys_of_several_shapes_are_refused(gemma4: Path, gemma3n: Path) -> None:
    with pytest.raises(ModelError, match="kv-cache-dtype int8: layers of gemma4_text differ in the size of their keys"):
        kv_layout(decoder_config(gemma4), torch.int8, 32)
    assert kv_layout(decoder_config(gemma3n), torch.int8, 32).is_quantised


def test_check_parallel_several_ranks_are_refused(gemma3n: Path) -> None:
    with pytest.raises(ModelError, match="tensor-parallel is 2, but gemma3n_text runs on one rank only"):
        check_parallel(gemma3n, "none", 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers 5 leaves no layer of each kind with keys and values"),
        ({"altup_active_idx": 4}, "altup_active_idx 4 is not in 0 to 3"),
        ({"activation_sparsity_pattern": [1.0] * 6}, "activation_sparsity_pattern .* must have numbers"),
    ],
)
def test_gemma_config_inconsistent_field_is_refused(
    gemma3n: Path, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    stated = json.loads((gemma3n / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**stated, **fields}))
    with pytest.raises(ModelError, match=message):
        read_model_config(tmp_path)


@pytest.mark.parametrize("family", ["gemma4", "gemma3n"])
def test_adapter_of_layers_with_shared_kv_equals_merged_weights(
    family: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    base = request.getfixturevalue(family)
    targets = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
    folder = make_adapter(tmp_path / "one", base, 1, rank=4, targets=targets)
    adapters, prompt = AdapterSet(), random_prompt(40)
    paged = PagedModel(base, adapters=adapters)
    adapters.add("one", read_adapter(folder))
    table = paged.blocks(40)
    parts = paged.logits([Chunk(0, prompt[:-1], 0, table, adapter=1)])
    parts += paged.logits([Chunk(0, prompt[-1:], 39, table, adapter=1)])
    with torch.inference_mode():
        expected = merged_model(base, folder)(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(torch.cat(parts), expected, atol=5e-4, rtol=0)
