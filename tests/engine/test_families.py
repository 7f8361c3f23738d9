"""Families that run through transformers' own code, on pages: as exact as by themselves, or refused with the reason."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from baton.engine.config.config_file import read_model_config
from baton.engine.config.model_config import DecoderConfig, ModelError
from baton.engine.kv_cache.layout import kv_layout
from baton.engine.load import load_model
from baton.engine.models.transformers_model import TransformersModel
from baton.engine.prepare import ModelOptions, prepare_model
from baton.engine.request import Chunk
from baton.engine.weights.model_shape import read_model_shape
from tests.fixtures.checkpoints import DECODERS, OTHERS, make_checkpoint
from tests.fixtures.paged import PagedModel, random_prompt, unlikely

CPU = torch.device("cpu")
LENGTHS = (1, 31, 32, 33, 100)
TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def write_config(folder: Path, model_type: str, **fields: Any) -> Path:
    AutoConfig.for_model(model_type, **fields).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=OTHERS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("gpt2_alone"), "gpt2")


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def test_logits_of_uneven_chunks_equal_transformers(checkpoint: Path, expected: Any) -> None:
    paged = PagedModel(checkpoint)
    prompt = random_prompt(100)
    table = paged.blocks(100)
    ends = (1, 2, 9, 10, 43, 60, 99, 100)
    parts = []
    for start, end in zip((0, *ends), ends, strict=False):
        parts += paged.logits([Chunk(0, prompt[start:end], start, table)])
    with torch.inference_mode():
        logits = expected(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(torch.cat(parts), logits, atol=1e-4, rtol=0)


def test_greedy_continuations_of_a_mixed_batch_equal_generate(checkpoint: Path, expected: Any) -> None:
    steps = 24
    prompts = [random_prompt(length, seed=1) for length in LENGTHS]
    paged = PagedModel(checkpoint, block_tokens=8, blocks=80)
    continued = paged.greedy(prompts, steps, chunk_tokens=30)
    for prompt, tokens in zip(prompts, continued, strict=True):
        assert unlikely(expected, prompt, tokens) == []


@pytest.mark.parametrize("family", ["mixtral", "phi3", "gpt2"])
def test_a_checkpoint_in_shards_is_the_same_model(family: str, tmp_path: Path) -> None:
    whole = make_checkpoint(tmp_path / "whole", family)
    model = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    prompts = [random_prompt(33), random_prompt(7)]
    answers = [PagedModel(folder).greedy(prompts, 12, 16) for folder in (whole, tmp_path / "shards")]
    assert answers[0] == answers[1]


def test_a_log_line_says_that_transformers_code_runs(gpt2: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model = load_model(gpt2, torch.float32, CPU, progress=False)
    assert isinstance(model, TransformersModel)
    [record] = [record for record in caplog.records if record.name.startswith("baton.engine")]
    assert (
        record.message
        == "gpt2 has no native implementation: running transformers' code on paged attention, which is slower"
    )


def test_bfloat16_is_checked_against_itself_too(gpt2: Path) -> None:
    assert load_model(gpt2, torch.bfloat16, CPU, progress=False).dtype == torch.bfloat16


def test_what_the_decoder_lacks_falls_to_transformers(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", mlp_bias=True)
    assert not isinstance(read_model_config(folder), DecoderConfig)
    prompt = random_prompt(60)
    own = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    paged = PagedModel(folder)
    with torch.inference_mode():
        expected = own(torch.tensor([prompt])).logits[0]
    [logits] = paged.logits([Chunk(0, prompt, 0, paged.blocks(60))])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", DECODERS)
def test_the_decoder_computes_its_own_families(family: str, tmp_path: Path) -> None:
    fields = {**TINY, "num_hidden_layers": 4, **DECODERS[family]}
    assert isinstance(read_model_config(write_config(tmp_path, family, **fields)), DecoderConfig)


def test_a_pool_is_sized_for_any_family(gpt2: Path) -> None:
    prepared = prepare_model(ModelOptions(gpt2, CPU, "float32", 32, 8 << 20, None))
    assert prepared.layout.token_bytes == 4 * 2 * 4 * 16 * 4  # layers, keys and values, heads, head_dim, bytes
    assert (prepared.config.max_positions, prepared.config.vocab_size) == (2048, 512)
    assert prepared.max_model_len == 2048
    shape = read_model_shape(gpt2)
    assert kv_layout(shape.config, torch.float32, prepared.layout.block_tokens) == prepared.layout
    assert shape.parameters == sum(tensor.numel() for tensor in load_file(gpt2 / "model.safetensors").values())


def test_weights_of_transformers_code_are_not_quantised(gpt2: Path) -> None:
    with pytest.raises(ModelError, match="needs plain weights"):
        load_model(gpt2, torch.float32, CPU, progress=False, quantize="int8")


def test_keys_wider_than_values_size_the_pool(tmp_path: Path) -> None:
    latent = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12, "q_lora_rank": None, "kv_lora_rank": 8}
    few = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 8}
    fields = {**TINY, **latent, **few, "num_key_value_heads": 4, "first_k_dense_replace": 1, "attention_bias": True}
    config = read_model_config(write_config(tmp_path, "deepseek_v3", **fields))
    assert (config.num_kv_heads, config.head_dim, config.num_layers) == (4, 16, 2)


@pytest.mark.parametrize(
    ("model_type", "fields", "reason"),
    [
        ("bloom", {"hidden_size": 32, "n_head": 4, "n_layer": 2, "vocab_size": 64}, "attention interface"),
        ("falcon", TINY, "attention interface"),
        ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 64}, "attention interface"),
        ("mamba", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64}, "a state besides keys and values"),
        ("stablelm", TINY, "pass keyword arguments"),
        ("electra", TINY, "not causal"),
        ("t5", {"d_model": 32, "num_layers": 2, "vocab_size": 64}, "no causal language model"),
        ("bart", {"d_model": 32, "vocab_size": 64}, "an encoder"),
        ("phimoe", {**TINY, "num_local_experts": 2, "sliding_window": 16}, "sliding window is not passed"),
        ("phi", {**TINY, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic'"),
        (
            "lfm2",
            {**TINY, "layer_types": ["conv", "full_attention"], "use_bidirectional_attention": True},
            "not every layer attends",
        ),
    ],
)
def test_what_cannot_run_on_pages_is_refused_with_the_reason(
    model_type: str, fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=f"model_type '{model_type}' cannot be served: .*{reason}"):
        read_model_config(write_config(tmp_path, model_type, **{"pad_token_id": 0, **fields}))


def test_code_that_a_checkpoint_brings_along_is_not_run(tmp_path: Path) -> None:
    stated = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    (tmp_path / "own.py").write_text("raise SystemExit('it ran')")
    with pytest.raises(ModelError, match="trust_remote_code"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"transformer.h.1.mlp.c_fc.weight": None}, r"missing keys.*h\.1\.mlp\.c_fc\.weight"),
        ({"transformer.h.7.mlp.c_fc.weight": torch.zeros(4)}, r"unexpected keys.*h\.7\.mlp\.c_fc\.weight"),
    ],
)
def test_weights_that_lack_something_or_have_too_much_are_named(
    gpt2: Path, change: dict[str, torch.Tensor | None], named: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((gpt2 / "config.json").read_bytes())
    tensors = {**load_file(gpt2 / "model.safetensors"), **change}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=named):
        load_model(tmp_path, torch.float32, CPU, progress=False)


def test_pickled_weights_are_not_read(gpt2: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((gpt2 / "config.json").read_bytes())
    torch.save(load_file(gpt2 / "model.safetensors"), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="safetensors"):
        load_model(tmp_path, torch.float32, CPU, progress=False)
