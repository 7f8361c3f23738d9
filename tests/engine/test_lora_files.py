"""PEFT folders: what is read, and what is refused by name because it would be another computation."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.config.model_config import ModelError
from baton.engine.lora.adapters import AdapterSet
from baton.engine.lora.files import AdapterConfig, adapter_digest, read_adapter, read_adapter_config
from tests.fixtures.adapters import make_adapter
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import PagedModel

DOWN = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
UP = DOWN.replace("lora_A", "lora_B")


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    return make_adapter(tmp_path / "adapter", checkpoint, seed=1, rank=4, targets=("q_proj", "down_proj"))


def restate(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def restore(folder: Path, changed: dict[str, torch.Tensor], without: tuple[str, ...] = ()) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path) | changed
    save_file({name: tensor for name, tensor in tensors.items() if name not in without}, path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bias", "lora_only"),
        ("use_dora", True),
        ("modules_to_save", ["lm_head"]),
        ("lora_bias", True),
        ("layer_replication", [[0, 2]]),
        ("target_parameters", ["experts.gate_up_proj"]),
        ("trainable_token_indices", [1]),
        ("use_qalora", True),
        ("init_lora_weights", "pissa_niter_4"),
        ("peft_type", "LOHA"),
        ("r", 0),
        ("lora_alpha", "much"),
        ("rank_pattern", {"(": 4}),
        ("a_field_of_tomorrow", {"changes": "all"}),
    ],
)
def test_adapter_unlike_pefts_computation_is_rejected_by_field(folder: Path, field: str, value: object) -> None:
    restate(folder, **{field: value})
    with pytest.raises(ModelError, match=field):
        read_adapter(folder)


def test_scales_follow_patterns_and_rank_stabilisation() -> None:
    config = AdapterConfig(4, 8.0, False, {"k_proj": 16}, {r"layers\.1\..*": 2.0}, ())
    assert config.scale_of("model.layers.0.self_attn.q_proj") == 2.0
    assert config.scale_of("model.layers.0.self_attn.k_proj") == 0.5
    assert config.scale_of("model.layers.1.self_attn.k_proj") == 0.125
    assert AdapterConfig(16, 8.0, True, {}, {}, ()).scale_of("any") == 2.0


def test_folder_without_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no adapter_config\.json"):
        read_adapter_config(tmp_path)


def test_pickled_weights_are_not_read(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors"):
        read_adapter(folder)
    with pytest.raises(ModelError, match="only safetensors"):
        adapter_digest(folder)


@pytest.mark.parametrize(
    ("changed", "without", "message"),
    [
        ({}, (UP,), "only one of lora_A and lora_B"),
        ({DOWN: torch.zeros(5, 64)}, (), "rank must be 4"),
        ({UP: torch.full((64, 4), torch.nan)}, (), "not finite"),
        ({DOWN: torch.zeros(4, 64, dtype=torch.int8)}, (), "int8"),
        ({DOWN.replace("lora_A", "lora_embedding_A"): torch.zeros(4, 8)}, (), "lora_embedding_A"),
        ({DOWN.replace("lora_A", "lora_magnitude_vector"): torch.zeros(4)}, (), "lora_magnitude_vector"),
    ],
)
def test_tensors_that_do_not_make_an_adapter_are_refused(
    folder: Path, changed: dict[str, torch.Tensor], without: tuple[str, ...], message: str
) -> None:
    restore(folder, changed, without)
    with pytest.raises(ModelError, match=message):
        read_adapter(folder)


@pytest.mark.parametrize(
    ("fields", "adapted"),
    [
        ({"target_modules": ["q_proj"]}, {"layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj"}),
        ({"target_modules": r".*\.1\.(self_attn|mlp)\..*"}, {"layers.1.self_attn.q_proj", "layers.1.mlp.down_proj"}),
        ({"exclude_modules": ["q_proj"]}, {"layers.0.mlp.down_proj", "layers.1.mlp.down_proj"}),
        ({"exclude_modules": r".*\.0\..*"}, {"layers.1.self_attn.q_proj", "layers.1.mlp.down_proj"}),
        ({"layers_to_transform": [1]}, {"layers.1.self_attn.q_proj", "layers.1.mlp.down_proj"}),
        (
            {"layers_to_transform": 1, "layers_pattern": "layers"},
            {"layers.1.self_attn.q_proj", "layers.1.mlp.down_proj"},
        ),
    ],
)
def test_read_adapter_leaves_tensors_aside_that_peft_does_not_target(
    tmp_path: Path, fields: dict[str, Any], adapted: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    two_layers = make_checkpoint(tmp_path / "base", "llama", num_hidden_layers=2)
    folder = make_adapter(tmp_path / "adapter", two_layers, seed=1, rank=4, targets=("q_proj", "down_proj"))
    everything = adapter_digest(folder)
    restate(folder, **fields)
    assert read_adapter(folder).factors.keys() == {f"model.{name}" for name in adapted}
    assert adapter_digest(folder) != everything
    assert "ignoring the tensors of 2 modules" in caplog.text


@pytest.mark.parametrize(
    ("fields", "module", "adapted"),
    [
        ({"layers_to_transform": [1]}, "model.layers.1.mlp.experts.0.q_proj", True),
        ({"layers_to_transform": [0]}, "model.layers.1.mlp.experts.0.q_proj", False),
        ({"layers_to_transform": [0], "layers_pattern": "layers"}, "layers.0.q_proj", True),
        ({"layers_to_transform": [0]}, "layers.0.q_proj", False),
        ({"layers_to_transform": [5], "target_modules": ["layers.0.q_proj"]}, "layers.0.q_proj", True),
        ({"target_modules": "all-linear"}, "lm_head", False),
        ({"target_modules": "all-linear"}, "model.layers.0.mlp.up_proj", True),
    ],
)
def test_adapter_config_targets_the_modules_that_peft_targets(
    folder: Path, fields: dict[str, Any], module: str, adapted: bool
) -> None:
    restate(folder, **({"target_modules": ["q_proj"]} | fields))
    assert read_adapter_config(folder).targets(module) is adapted


def test_read_adapter_ignores_untargeted_embedding_factors(folder: Path) -> None:
    restore(folder, {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 8)}, ())
    assert "model.embed_tokens" not in read_adapter(folder).factors


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora_alpha": 10**400}, "lora_alpha is 1000"),
        ({"lora_alpha": 1e300}, "lora_alpha is 1e"),
        ({"target_modules": ["\ud800"]}, "there is no adapter in it"),
        ({"target_modules": [["q_proj"]]}, "target_modules is"),
        ({"target_modules": "(" * 900 + ")" * 900}, "target_modules has an expression of 1800 characters"),
        ({"target_modules": "(" * 450 + "q" + ")" * 450}, "target_modules has|there is no adapter in it"),
        ({"rank_pattern": {"(?i)q_proj": 4}}, "rank_pattern has .* no regular expression"),
        ({"rank_pattern": {r"(.|..|...)*(?<=\d\d)": 4}}, "rank_pattern has .* takes more than 2 s"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern is not a mapping"),
        ({"layers_to_transform": "1"}, "layers_to_transform is '1'"),
        ({"layers_to_transform": [0], "layers_pattern": "(q"}, "layers_pattern has"),
        ({"r": 10**400}, "its rank must be 1000"),
    ],
)
def test_read_adapter_with_hostile_configuration_is_refused_by_file_and_field(
    folder: Path, fields: dict[str, Any], message: str
) -> None:
    restate(folder, **fields)
    with pytest.raises(ModelError, match=message) as refused:
        read_adapter(folder)
    assert str(folder) in str(refused.value)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    "text",
    ["[" * 200_000, '{"r": ' * 2000, " " * 70_000_000, "[]", "\0", "1" * 5000],
    ids=["unclosed", "nested", "large", "array", "zero", "digits"],
)
def test_read_adapter_with_an_invalid_configuration_is_rejected(folder: Path, text: str) -> None:
    (folder / "adapter_config.json").write_text(text)
    with pytest.raises(ModelError, match=r"adapter_config\.json"):
        read_adapter(folder)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "README.md"])
def test_read_adapter_of_a_folder_with_a_pipe_is_rejected_immediately(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ModelError, match=f"{name}: not a regular file"):
        read_adapter(folder)


def test_target_without_tensors_is_refused(folder: Path) -> None:
    restate(folder, target_modules=["q_proj", "down_proj", "o_proj"])
    with pytest.raises(ModelError, match="nothing for o_proj"):
        read_adapter(folder)


def test_adapter_of_the_head_is_refused(checkpoint: Path, folder: Path) -> None:
    restate(folder, target_modules=["q_proj", "down_proj", "lm_head"])
    name = "base_model.model.lm_head.lora_{}.weight"
    restore(folder, {name.format("A"): torch.zeros(4, 64), name.format("B"): torch.zeros(512, 4)})
    adapters = AdapterSet()
    PagedModel(checkpoint, adapters=adapters)
    with pytest.raises(ModelError, match="'mine' changes lm_head"):
        adapters.add("mine", read_adapter(folder))


def test_adapter_of_another_size_of_model_is_refused(folder: Path, tmp_path: Path) -> None:
    adapters = AdapterSet()
    PagedModel(make_checkpoint(tmp_path / "wide", "llama", hidden_size=128), adapters=adapters)
    with pytest.raises(ModelError, match=r"self_attn\.q_proj of \[64, 64\], not \[64, 128\]|down_proj"):
        adapters.add("mine", read_adapter(folder))


def test_digest_names_factors_and_scale_and_nothing_else(folder: Path) -> None:
    first = adapter_digest(folder)
    restate(folder, base_model_name_or_path="elsewhere", lora_dropout=0.5)
    assert adapter_digest(folder) == first
    restate(folder, lora_alpha=17)
    rescaled = adapter_digest(folder)
    restore(folder, {DOWN: torch.zeros(4, 64)})
    assert len({first, rescaled, adapter_digest(folder)}) == 3
