"""Checkpoints as DeepSeek's: E4M3 with a scale for each block of a matrix, and a layer that predicts further tokens."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from baton.engine.config.config_file import read_model_config
from baton.engine.config.model_config import ModelError
from baton.engine.load import load_model
from baton.engine.models.decoder import DecoderModel
from baton.engine.models.linear import BlockFp8Linear, StackedLinear
from baton.engine.weights.files import loaded_bytes
from baton.engine.weights.formats import WeightFormat, packed_format, weight_format
from baton.kernels.dispatch import on_the_interpreter
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import CPU, PagedModel, random_prompt, unlikely

BLOCK = 32
PLAIN = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")
STATED = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}


def in_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As stored: numbers and scales; and the weight that they stand for. Block by block."""
    outputs, inputs = weight.shape
    scales = torch.empty(-(-outputs // BLOCK), -(-inputs // BLOCK))
    numbers, meant = torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    for row in range(0, outputs, BLOCK):
        for column in range(0, inputs, BLOCK):
            own = (slice(row, row + BLOCK), slice(column, column + BLOCK))
            scale = weight[own].abs().max() / 448
            numbers[own] = (weight[own] / scale).to(torch.float8_e4m3fn)
            meant[own] = numbers[own].float() * scale
            scales[row // BLOCK, column // BLOCK] = scale
    return numbers, scales, meant


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("fp8_blocks"), "deepseek_v3", num_nextn_predict_layers=1)


@pytest.fixture(scope="module")
def meant(checkpoint: Path) -> Any:
    """Rewrites the checkpoint in blocks. The model of transformers that it stands for."""
    plain, stored, model = load_file(checkpoint / "model.safetensors"), {}, {}
    for name, tensor in plain.items():
        stored[name] = model[name] = tensor
        if tensor.dim() == 2 and not name.endswith(PLAIN):
            numbers, scales, model[name] = in_blocks(tensor)
            stored |= {name: numbers, f"{name}_scale_inv": scales}
    stored["model.layers.4.eh_proj.weight"] = torch.zeros(3, 4)
    save_file(model, checkpoint / "model.safetensors", metadata={"format": "pt"})
    expected = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    save_file(stored, checkpoint / "model.safetensors")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "quantization_config": STATED}))
    return expected


@pytest.mark.parametrize("packed", [False, True])
def test_a_checkpoint_in_blocks_answers_as_the_weights_that_it_stands_for(
    checkpoint: Path, meant: Any, packed: bool
) -> None:
    paged = PagedModel(checkpoint, 8, 80, packed=packed)
    assert isinstance(paged.model, DecoderModel)
    assert isinstance(paged.model.layers[1].qkv, StackedLinear)  # 40 outputs of the first are no whole blocks
    assert isinstance(paged.model.layers[1].output, BlockFp8Linear)
    prompts = [random_prompt(length) for length in (1, 40, 100)]
    for prompt, answer in zip(prompts, paged.greedy(prompts, 20, 30), strict=True):
        assert unlikely(meant, prompt, answer) == []


def test_a_gpu_is_said_to_be_slow_with_experts_in_blocks_once(
    checkpoint: Path, meant: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = make_checkpoint(tmp_path, "mixtral")
    load_model(checkpoint, torch.float32, CPU, progress=False)
    with on_the_interpreter():
        load_model(plain, torch.float32, CPU, progress=False)
        assert not caplog.messages
        load_model(checkpoint, torch.float32, CPU, progress=False)
    [message] = caplog.messages
    assert message.startswith("experts stored as fp8_blocks have no GPU kernel")


def test_weights_in_blocks_stay_a_byte_each(checkpoint: Path, meant: Any) -> None:
    assert weight_format(checkpoint, "none") is WeightFormat.FP8_BLOCKS
    name_of = read_model_config(checkpoint).tensor_name
    found = loaded_bytes(checkpoint, WeightFormat.FP8_BLOCKS, 4, name_of=name_of).tensors
    assert found["model.layers.1.self_attn.o_proj.weight"] == 64 * 80
    assert found["model.layers.1.self_attn.kv_b_proj.weight"] == 4 * (24 + 20) * 32 * 4  # spelled out
    assert not any(name.startswith("model.layers.4.") for name in found)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"weight_block_size": [128]}, "weight_block_size \\[128\\] is not supported"),
        ({"fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"activation_scheme": "static"}, "activation_scheme 'static'"),
    ],
)
def test_other_ways_of_fp8_are_refused_by_name(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {**STATED, **change}}))
    with pytest.raises(ModelError, match=named):
        packed_format(tmp_path)


def test_fp8_blocks_of_compressed_tensors_equal_those_of_deepseek(checkpoint: Path, meant: Any, tmp_path: Path) -> None:
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [BLOCK, BLOCK]}
    stated = {"format": "float-quantized", "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    folder = Path(shutil.copytree(checkpoint, tmp_path / "compressed"))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", **stated}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("weight_scale_inv", "weight_scale"): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors")
    compressed = PagedModel(folder, 8, 80)
    assert isinstance(compressed.model, DecoderModel)
    assert isinstance(compressed.model.layers[1].output, BlockFp8Linear)
    prompts = [random_prompt(40)]
    assert compressed.greedy(prompts, 20, 30) == PagedModel(checkpoint, 8, 80).greedy(prompts, 20, 30)
