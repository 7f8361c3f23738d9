"""gpt-oss with experts in MXFP4, against transformers on the numbers that its own code makes of their blocks."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from baton.engine.config.config_file import decoder_config, read_model_config
from baton.engine.config.model_config import Activation, DecoderConfig, ModelError
from baton.engine.config.resolved_config import fields_of, read_transformers_config
from baton.engine.load import load_model
from baton.engine.models.decoder import DecoderModel
from baton.engine.models.feed_forward import Experts, Gated
from baton.engine.models.linear import KernelLinear, MatmulBackend, PackedLinear
from baton.engine.parallel.shard import Shard
from baton.engine.weights.files import PlannedWeights, loaded_bytes, planned_weights
from baton.engine.weights.formats import WeightFormat
from baton.engine.weights.model_shape import read_model_shape
from baton.engine.weights.read import open_weights
from baton.engine.weights.weight import Fp4Weight
from baton.kernels.packed_weight import Stored
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.mxfp4 import draw_mxfp4
from tests.fixtures.paged import CPU, PagedModel, random_prompt, unlikely

EXPERTS = "model.layers.0.mlp.experts"
SHAPE: dict[str, Any] = {"num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2}


class Made(NamedTuple):
    folder: Path
    expected: Any  # a model of transformers
    weights: dict[str, torch.Tensor]  # by name, those of experts spelled out: `[experts, inputs, outputs]`


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = make_checkpoint(tmp_path_factory.mktemp("gpt_oss") / "stored", "gpt_oss", **SHAPE)
    plain = folder.parent / "plain"
    shutil.copytree(folder, plain)
    weights = draw_mxfp4(folder)
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    return Made(folder, AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval(), weights)


def first_expert(folder: Path, packed: bool) -> Gated:
    model = load_model(folder, torch.float32, CPU, progress=False, packed=packed)
    assert isinstance(model, DecoderModel)
    experts = model.layers[0].feed_forward
    assert isinstance(experts, Experts)
    return experts.experts[0]


def test_greedy_tokens_are_those_of_the_dequantised_weights(made: Made) -> None:
    prompts = [random_prompt(length) for length in (1, 33, 70)]
    continued = PagedModel(made.folder, block_tokens=8).greedy(prompts, 24, chunk_tokens=30)
    for prompt, tokens in zip(prompts, continued, strict=True):
        assert unlikely(made.expected, prompt, tokens) == []


def test_experts_stay_in_4_bits(made: Made) -> None:
    expert = first_expert(made.folder, packed=False)
    assert isinstance(expert.gate_up, KernelLinear) and isinstance(expert.down, KernelLinear)
    assert expert.gate_up.weight.data.shape == (2 * 96, 64 // 2)
    assert expert.down.weight.data.shape == (64, 96 // 2)
    assert expert.down.weight.data.dtype == torch.uint8


@pytest.mark.usefixtures("native_kernels")
def test_native_kernels_read_4_bits_and_round_inputs_alone(made: Made) -> None:
    expert = first_expert(made.folder, packed=True)
    for linear in (expert.gate_up, expert.down):
        assert isinstance(linear, PackedLinear) and linear.weight.stored is Stored.FP4
    x = torch.randint(-127, 128, (3, 64)).float()
    x[:, ::32] = 127.0  # the largest of each group, so that nothing is rounded
    weight = made.weights[f"{EXPERTS}.gate_up_proj"][0]
    products = x @ weight + made.weights[f"{EXPERTS}.gate_up_proj_bias"][0]
    expected = torch.cat((products[:, ::2], products[:, 1::2]), dim=1)
    torch.testing.assert_close(expert.gate_up(x), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_of_two_ranks_reads_its_part_of_an_expert(made: Made, rank: int) -> None:
    part, weights = Shard(rank, 2), made.weights
    config = read_model_config(made.folder)
    assert isinstance(config, DecoderConfig)
    refused = pytest.raises(ModelError, match="48 inputs on each rank, and mxfp4 needs a multiple of 32")
    with refused, open_weights(made.folder, config, WeightFormat.MXFP4, torch.float32, CPU, part, False) as source:
        own = source.weight([f"{EXPERTS}.1.gate_proj", f"{EXPERTS}.1.up_proj"], (96, 96), 64, bias=True)
        assert isinstance(own, Fp4Weight) and own.bias is not None
        linear = MatmulBackend(CPU, torch.float32).linear(own)
        gates, ups = (weights[f"{EXPERTS}.gate_up_proj"][1, :, kind::2].T.chunk(2)[rank] for kind in (0, 1))
        torch.testing.assert_close(linear(torch.eye(64)).T - own.bias[:, None], torch.cat((gates, ups)))
        source.weight([f"{EXPERTS}.1.down_proj"], (64,), 96, bias=True)


def test_memory_is_planned_by_the_bytes_of_blocks_and_scales(made: Made) -> None:
    numbers = {name: tensor.numel() for name, tensor in made.weights.items()}
    size = sum(count for name, count in numbers.items() if name.endswith(("experts.gate_up_proj", "experts.down_proj")))
    expected = size // 2 + size // 32 * 3 + (sum(numbers.values()) - size) * 4
    assert loaded_bytes(made.folder, WeightFormat.MXFP4, 4).total == expected
    planned = planned_weights(made.folder, read_model_shape(made.folder).tensors, "none", 4)
    assert planned == PlannedWeights(WeightFormat.MXFP4, expected)


def test_mxfp4_checkpoint_is_not_quantised_again(made: Made) -> None:
    with pytest.raises(ModelError, match="already quantised as mxfp4"):
        load_model(made.folder, torch.float32, CPU, progress=False, quantize="int8")


@pytest.mark.parametrize("fields", [{"swiglu_limit": 5.0}, {"swiglu_alpha": 1.0}])
def test_other_gates_are_refused_by_name(made: Made, fields: dict[str, float], tmp_path: Path) -> None:
    stated = json.loads((made.folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(stated | fields))
    with pytest.raises(ModelError, match=next(iter(fields))):
        read_model_config(tmp_path)


def test_gates_need_not_be_stated_where_transformers_knows_no_others(made: Made) -> None:
    fields = dict(fields_of(read_transformers_config(made.folder)))
    for name in ("swiglu_limit", "swiglu_alpha"):
        fields.pop(name, None)
    assert decoder_config(fields, frozenset()).activation is Activation.CLAMPED


PUBLISHED: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 8,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": 201088,
}  # of openai/gpt-oss-20b and -120b, which differ in layers and experts


@pytest.mark.parametrize(("layers", "experts", "gibibytes"), [(24, 32, 13), (36, 128, 67)])
def test_published_configurations_are_read_and_planned(
    layers: int, experts: int, gibibytes: int, tmp_path: Path
) -> None:
    kinds = ["sliding_attention", "full_attention"] * (layers // 2)
    fields = {**PUBLISHED, "num_hidden_layers": layers, "num_local_experts": experts, "layer_types": kinds}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = read_model_config(tmp_path)
    assert isinstance(config, DecoderConfig) and config.experts is not None
    assert config.sliding_window == (128, None) * (layers // 2)
    assert (config.ropes[0].factor, config.ropes[0].truncates) == (32.0, False)
    assert config.experts.count == experts and config.sinks and config.output_bias
    planned = planned_weights(tmp_path, read_model_shape(tmp_path).tensors, "none", 2)
    assert planned.format is WeightFormat.MXFP4
    assert planned.size_bytes >> 30 == gibibytes
