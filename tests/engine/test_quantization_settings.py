"""Places and spellings of the quantisation settings of published checkpoints, and settings that are refused by name.

The expected tokens are those of tests/fixtures/quantized, from other projects' code.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from baton.cli.__main__ import app
from baton.engine.config.config_file import read_model_config
from baton.engine.config.model_config import ModelError
from baton.engine.load import check_tensors, load_model
from baton.engine.weights.files import loaded_bytes, model_fingerprint, planned_weights
from baton.engine.weights.formats import WeightFormat, stored_format
from baton.engine.weights.model_shape import read_model_shape
from tests.fixtures.paged import CPU, PagedModel

FIXTURES = Path(__file__).parents[1] / "fixtures" / "quantized"
PROMPT_TOKENS = 24
Tensors = dict[str, torch.Tensor]


def rewritten(name: str, target: Path, stated: dict[str, Any] | None, file: str, field: str = "") -> Path:
    """Copy a fixture, with `stated` as its quantisation in `file`, in a `field` of it or alone."""
    folder = Path(shutil.copytree(FIXTURES / name, target / name))
    config = json.loads((folder / "config.json").read_text())
    own = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    content = own if stated is None else stated
    written = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps({**written, field: content} if field else {**written, **content}))
    return folder


def change_tensors(folder: Path, change: Callable[[str, torch.Tensor], Tensors]) -> None:
    stored = load_file(folder / "model.safetensors")
    changed: Tensors = {}
    for name, tensor in stored.items():
        changed |= change(name, tensor)
    save_file(changed, folder / "model.safetensors")


def answers_as_expected(folder: Path) -> bool:
    tokens = load_file(folder / "expected.safetensors")["tokens"].tolist()
    (answer,) = PagedModel(folder).greedy([tokens[:PROMPT_TOKENS]], len(tokens) - PROMPT_TOKENS, chunk_tokens=7)
    return bool(answer == tokens[PROMPT_TOKENS:])


AUTO_AWQ = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
AUTO_GPTQ = {"bits": 4, "group_size": 16, "damp_percent": 0.01, "desc_act": True, "sym": False, "true_sequential": True}
AUTO_ROUND = {
    "quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq",
    "bits": 4,
    "data_type": "int",
    "group_size": 16,
    "sym": False,
    "extra_config": {"lm_head": {"bits": 16, "data_type": "float"}},
}
MODELOPT = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
LAYOUTS: dict[str, tuple[str, dict[str, Any] | None, str, str, str]] = {
    "compression_config": ("ct_w8a8", None, "config.json", "compression_config", "compressed-tensors"),
    "quant_config.json": ("awq", AUTO_AWQ, "quant_config.json", "", "awq"),
    "quantize_config.json of AWQ": ("awq", AUTO_AWQ, "quantize_config.json", "", "awq"),
    "quantize_config.json": ("gptq", AUTO_GPTQ, "quantize_config.json", "", "gptq"),
    "hf_quant_config.json": ("ct_fp8", MODELOPT, "hf_quant_config.json", "quantization", "modelopt"),
    "modelopt": (
        "ct_fp8_channel",
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        "config.json",
        "quantization_config",
        "modelopt",
    ),
    "fbgemm": ("ct_fp8_channel", {"quant_method": "fbgemm_fp8"}, "config.json", "quantization_config", "fp8_tensors"),
    "auto-round": ("gptq", AUTO_ROUND, "config.json", "quantization_config", "gptq"),
    "load_in_4bit": ("bnb_nf4", {"load_in_4bit": True}, "config.json", "quantization_config", "bitsandbytes"),
    "frozen": (
        "ct_fp8",
        {
            "quant_method": "compressed-tensors",
            "format": "naive-quantized",
            "quantization_status": "frozen",
            "config_groups": {"0": {"targets": ["re:.*proj"], "weights": {"num_bits": 8, "type": "float"}}},
        },
        "config.json",
        "quantization_config",
        "compressed-tensors",
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_quantization_settings_of_a_layout_are_found(layout: str, tmp_path: Path) -> None:
    name, stated, file, field, format = LAYOUTS[layout]
    folder = rewritten(name, tmp_path, stated, file, field)
    assert stored_format(folder) == format
    assert answers_as_expected(folder)


def test_quantization_settings_of_config_json_take_precedence(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FIXTURES / "awq", tmp_path / "awq"))
    (folder / "quantize_config.json").write_text(json.dumps({"bits": 8}))
    assert stored_format(folder) is WeightFormat.AWQ


def test_file_of_another_tool_is_no_quantisation(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "quant_config.json").write_text(json.dumps({"scheme": "own"}))
    assert stored_format(tmp_path) is WeightFormat.PLAIN


def test_fp8_of_transformers_with_a_scale_per_tensor_is_read(tmp_path: Path) -> None:
    """Ministral 3 and Devstral 2 are published so."""

    def rename(name: str, tensor: torch.Tensor) -> Tensors:
        if not name.endswith("weight_scale"):
            return {name: tensor}
        module = name.removesuffix("weight_scale")
        return {f"{module}weight_scale_inv": tensor.reshape(()), f"{module}activation_scale": torch.ones(())}

    stated = {"quant_method": "fp8", "activation_scheme": "static", "dequantize": False, "weight_block_size": None}
    folder = rewritten("ct_fp8", tmp_path, stated, "config.json", "quantization_config")
    change_tensors(folder, rename)
    assert answers_as_expected(folder)


def test_nvfp4_of_modelopt_equals_that_of_compressed_tensors(tmp_path: Path) -> None:
    def rename(name: str, tensor: torch.Tensor) -> Tensors:
        if name.endswith("weight_global_scale"):
            return {name.replace("weight_global_scale", "weight_scale_2"): 1 / tensor[0]}
        return {name.replace("weight_packed", "weight"): tensor, f"{name}.input_scale": torch.ones(())}

    stated = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    folder = rewritten("ct_nvfp4", tmp_path, stated, "hf_quant_config.json", "quantization")
    change_tensors(folder, rename)
    assert answers_as_expected(folder)


def test_scales_of_inputs_and_of_kv_are_not_read(tmp_path: Path) -> None:
    def add(name: str, tensor: torch.Tensor) -> Tensors:
        if name.endswith("v_proj.weight_packed"):
            attention = name.removesuffix("v_proj.weight_packed")
            unread = ("v_proj.input_global_scale", "k_scale", "v_scale", "q_scale")
            return {name: tensor, **{attention + each: torch.ones(1) for each in unread}}
        return {name: tensor}

    folder = Path(shutil.copytree(FIXTURES / "ct_nvfp4", tmp_path / "with_inputs"))
    change_tensors(folder, add)
    assert answers_as_expected(folder)


def with_zero_points(target: Path) -> Path:
    """Copy the int8 fixture, with all rows that can be shifted moved by a zero point."""

    def shift(name: str, tensor: torch.Tensor) -> Tensors:
        if tensor.dtype != torch.int8:
            return {name: tensor}
        zeros = -(tensor.amin(dim=1, keepdim=True) > -128).to(torch.int8)
        return {name: tensor + zeros, f"{name}_zero_point": zeros}

    folder = Path(shutil.copytree(FIXTURES / "ct_w8a8", target))
    change_tensors(folder, shift)
    config = json.loads((folder / "config.json").read_text())
    for each in config["quantization_config"]["config_groups"].values():
        each["weights"]["symmetric"] = False
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_zero_points_of_int8_per_output_are_subtracted(tmp_path: Path) -> None:
    assert answers_as_expected(with_zero_points(tmp_path / "shifted"))


def test_size_of_int8_with_zero_points_is_that_of_expanded_weights(tmp_path: Path) -> None:
    folder = with_zero_points(tmp_path / "shifted")
    planned = planned_weights(folder, read_model_shape(folder).tensors, "none", number_bytes=4)
    assert planned.size_bytes == pytest.approx(4 * read_model_shape(folder).parameters, rel=0.1)
    assert loaded_bytes(folder, planned.format, number_bytes=4).total == pytest.approx(planned.size_bytes, rel=0.25)


def test_inputs_in_an_order_of_their_own_are_planned_and_served(tmp_path: Path) -> None:
    def order(name: str, tensor: torch.Tensor) -> Tensors:
        if not name.endswith("weight_packed"):
            return {name: tensor}
        group_of_inputs = torch.arange(tensor.shape[1] * 8, dtype=torch.int32) // 32
        return {name: tensor, name.replace("packed", "g_idx"): group_of_inputs}

    folder = Path(shutil.copytree(FIXTURES / "ct_w4a16", tmp_path / "ordered"))
    change_tensors(folder, order)
    check_tensors(folder, read_model_config(folder))
    assert answers_as_expected(folder)


def test_fingerprint_depends_on_settings_next_to_config_json(tmp_path: Path) -> None:
    folders = [
        rewritten("gptq", tmp_path / layout, AUTO_GPTQ | {"checkpoint_format": layout}, "quantize_config.json")
        for layout in ("gptq", "gptq_v2")
    ]
    assert model_fingerprint(folders[0]) != model_fingerprint(folders[1])


WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "tensor"}


def group(**changes: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {**WEIGHTS, **changes}}}}


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("ct_fp8", {"transform_config": {"config_groups": {"u": {}}}}, "transform_config is not supported"),
        (
            "ct_fp8",
            {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config of format 'sparse-24-bitmask'",
        ),
        ("ct_fp8", {"format": "dense", **group()}, "format 'dense' is not supported"),
        ("ct_fp8", {"format": "mxfp8-quantized", **group()}, "format 'mxfp8-quantized' is not supported"),
        ("ct_fp8", group(strategy="group"), r"config_groups\.group_0\.weights .* strategy 'group' .* float-quantized"),
        ("ct_fp8", group(num_bits=4), "num_bits 4 and strategy 'tensor' are not supported in float-quantized"),
        ("ct_fp8", group(strategy="block"), r"config_groups\.group_0\.weights\.block_structure None is not supported"),
        ("ct_fp8", {"config_groups": {"W8A8": ["Linear"]}}, r"config_groups\.W8A8 \['Linear'\] is not supported"),
        (
            "ct_fp8",
            {"config_groups": {"group_0": {"targets": ["Linear", "Embedding"], "weights": WEIGHTS}}},
            r"config_groups\.group_0\.targets 'Embedding'",
        ),
        ("ct_fp8", {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ' is not supported"),
        ("ct_fp8", {"quant_method": "fp8", "fmt": "e5m2"}, "fp8 of fmt 'e5m2' is not supported"),
        ("gptq", {"dynamic": {"+:.*down.*": {"bits": 8}}}, "gptq of 8 bits is not supported"),
        ("gptq", {"quant_method": "auto-round", "packing_format": "mlx"}, "packing_format 'mlx' is not supported"),
        ("gptq", {"quant_method": "auto-round", "extra_config": {"x": {"bits": 8}}}, "auto-round of 8 bits"),
    ],
)
def test_quantization_setting_that_is_not_served_is_refused_by_plan_and_engine(
    name: str, changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(FIXTURES / name, tmp_path / name))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=rf"config\.json: quantization_config: .*{named}") as refused:
        load_model(folder, torch.float32, CPU, progress=False)
    planned = CliRunner().invoke(app, ["plan", "--model", str(folder)])
    assert str(refused.value) in str(planned.exception)


@pytest.mark.parametrize("path", ["", "text_config."])
def test_empty_quantization_settings_are_refused_by_name_as_by_transformers(path: str, tmp_path: Path) -> None:
    stated: dict[str, Any] = {"quantization_config": {}}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": stated} if path else stated))
    with pytest.raises(ModelError, match=rf"config\.json: {path}quantization_config: must not be empty; remove the"):
        stored_format(tmp_path)


@pytest.mark.parametrize("stated", [{"quantization_config": None}, {"quantization_config": {}, "text_config": {}}])
def test_checkpoint_without_quantization_settings_is_plain(stated: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(stated))
    assert stored_format(tmp_path) is WeightFormat.PLAIN


@pytest.mark.parametrize("fields", [("quantization",), ("quantization", "quantization_config")])
def test_checkpoint_of_mlx_is_refused_by_name(fields: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({key: {"bits": 4, "group_size": 64} for key in fields}))
    with pytest.raises(ModelError, match=rf"config\.json: {fields[-1]}: method 'mlx' is not supported; supported: awq"):
        stored_format(tmp_path)


def test_setting_of_another_file_is_refused_by_that_file(tmp_path: Path) -> None:
    folder = rewritten("gptq", tmp_path, AUTO_GPTQ | {"bits": 3}, "quantize_config.json")
    with pytest.raises(ModelError, match=r"quantize_config\.json: gptq of 3 bits is not supported"):
        load_model(folder, torch.float32, CPU, progress=False)


@pytest.mark.parametrize(("name", "dtype"), [("ct_w8a8", "I8"), ("awq", "I32"), ("ct_fp8", "F8_E4M3")])
def test_quantised_weights_without_settings_are_named_before_they_are_read(
    name: str, dtype: str, tmp_path: Path
) -> None:
    folder = rewritten(name, tmp_path, {}, "config.json")
    named = f"is {dtype}, but neither config.json nor hf_quant_config.json nor"
    with pytest.raises(ModelError, match=rf"model\.safetensors: model\.layers\.\S+ {named}"):
        loaded_bytes(folder, WeightFormat.PLAIN, number_bytes=4)


@pytest.mark.parametrize("name", ["ct_w8a8", "ct_fp8_channel", "ct_w4a16", "ct_nvfp4", "bnb_nf4", "bnb_int8"])
def test_size_planned_from_config_json_is_about_that_of_the_loaded_weights(name: str) -> None:
    planned = planned_weights(FIXTURES / name, read_model_shape(FIXTURES / name).tensors, "none", number_bytes=2)
    loaded = loaded_bytes(FIXTURES / name, planned.format, number_bytes=2).total
    assert 0.8 < planned.size_bytes / loaded < 1.25
