"""Quantised checkpoints made by others' tools, against transformers on what others' code dequantises.

tests/fixtures/quantized/README.md says how they were made.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.config.model_config import ModelError
from baton.engine.load import load_model
from baton.engine.models.linear import Int4KernelLinear, KernelLinear, StackedLinear
from baton.engine.prepare import ModelOptions, prepare_model
from baton.engine.request import Chunk
from baton.engine.weights.files import loaded_bytes, model_fingerprint
from baton.engine.weights.formats import WeightFormat
from tests.fixtures.paged import CPU, PagedModel

FIXTURES = Path(__file__).parents[1] / "fixtures" / "quantized"
COMPRESSED = ("ct_w8a8", "ct_fp8", "ct_fp8_channel", "ct_w4a16", "ct_w4a16_zeros", "ct_w8a16", "ct_nvfp4")
BITSANDBYTES = ("bnb_nf4", "bnb_nf4_nested", "bnb_int8")
NAMES = ("awq", "gptq", "gptq_v2", "gguf", *COMPRESSED, *BITSANDBYTES)
FORMATS = {
    **{name: name.removesuffix("_v2") for name in NAMES},
    **dict.fromkeys(COMPRESSED, "compressed-tensors"),
    **dict.fromkeys(BITSANDBYTES, "bitsandbytes"),
}
PROMPT_TOKENS = 24


def copied(name: str, target: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / name, target / name))


def change_config(folder: Path, **fields: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"].update(fields)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_of_the_independently_dequantised_weights(name: str) -> None:
    tokens = load_file(FIXTURES / name / "expected.safetensors")["tokens"].tolist()
    prompt = tokens[:PROMPT_TOKENS]
    (answer,) = PagedModel(FIXTURES / name).greedy([prompt], len(tokens) - len(prompt), chunk_tokens=7)
    assert answer == tokens[PROMPT_TOKENS:]


LOGIT_ERRORS = {"ct_nvfp4": 0.06}  # compressed-tensors rounds the numbers of NVFP4 to bfloat16


@pytest.mark.parametrize("name", NAMES)
def test_every_logit_is_close(name: str) -> None:
    expected = load_file(FIXTURES / name / "expected.safetensors")
    paged, tokens = PagedModel(FIXTURES / name), expected["tokens"].tolist()
    (logits,) = paged.logits([Chunk(0, tokens, 0, paged.blocks(len(tokens)))])
    torch.testing.assert_close(logits, expected["logits"], atol=LOGIT_ERRORS.get(name, 1e-4), rtol=0.0)


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_is_as_close_as_it_can_be(name: str) -> None:
    expected = load_file(FIXTURES / name / "expected.safetensors")
    paged, tokens = PagedModel(FIXTURES / name, dtype=torch.bfloat16), expected["tokens"].tolist()
    (logits,) = paged.logits([Chunk(0, tokens, 0, paged.blocks(len(tokens)))])
    error = (logits - expected["logits"]).norm() / expected["logits"].norm()
    assert error < 0.03


def test_projections_stay_packed() -> None:
    layer = load_model(FIXTURES / "gptq", torch.float32, CPU, progress=False).layers[0]
    assert isinstance(layer.qkv, KernelLinear)
    assert layer.qkv.weight.data.dtype == torch.uint8
    assert layer.qkv.weight.data.shape == (192, 32)
    assert layer.qkv.column_order is not None


def test_the_kernel_of_torch_computes_in_bfloat16() -> None:
    layer = load_model(FIXTURES / "awq", torch.bfloat16, CPU, progress=False).layers[0]
    assert isinstance(layer.qkv, Int4KernelLinear)


def test_parts_whose_columns_have_another_order_are_not_fused(tmp_path: Path) -> None:
    """The same model with the inputs of k_proj regrouped: both its packed rows and g_idx, so that answers stay."""
    folder = copied("gptq", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj."
    groups = len(tensors[f"{name}scales"])
    turned = torch.arange(groups).roll(1)
    for kind in ("scales", "qzeros"):
        tensors[name + kind] = tensors[name + kind][turned].contiguous()
    tensors[f"{name}g_idx"] = turned.argsort()[tensors[f"{name}g_idx"].long()].int()
    save_file(tensors, folder / "model.safetensors")
    expected = load_file(folder / "expected.safetensors")
    paged, tokens = PagedModel(folder), expected["tokens"].tolist()
    assert isinstance(paged.model.layers[0].qkv, StackedLinear)
    (logits,) = paged.logits([Chunk(0, tokens, 0, paged.blocks(len(tokens)))])
    torch.testing.assert_close(logits, expected["logits"], atol=1e-4, rtol=0.0)


def test_the_old_format_differs_from_the_new_by_its_zero_points(tmp_path: Path) -> None:
    folder = copied("gptq", tmp_path)
    change_config(folder, checkpoint_format="gptq_v2")
    expected = load_file(folder / "expected.safetensors")
    paged, tokens = PagedModel(folder), expected["tokens"].tolist()
    (logits,) = paged.logits([Chunk(0, tokens, 0, paged.blocks(len(tokens)))])
    assert (logits - expected["logits"]).abs().max() > 0.1


def test_a_module_that_was_left_unquantised_is_read_as_it_is(tmp_path: Path) -> None:
    folder = copied("awq", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj."
    tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith(name)}
    tensors[f"{name}weight"] = torch.randn(64, 64, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors")
    down = load_model(folder, torch.float32, CPU, progress=False).layers[0].feed_forward.down
    torch.testing.assert_close(down.weight, tensors[f"{name}weight"].float())


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"bits": 8}, "8 bits is not supported"),
        ({"quant_method": "hqq"}, "'hqq' is not supported; supported: awq, gptq"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "compressed-tensors of format 'marlin-24'"),
        ({"checkpoint_format": "gemv"}, "version 'gemv' is not supported"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "'marlin' is not supported, only gptq"),
    ],
)
def test_what_is_not_read_is_refused_by_name(fields: dict[str, object], named: str, tmp_path: Path) -> None:
    folder = copied("awq", tmp_path)
    change_config(folder, **fields)
    with pytest.raises(ModelError, match=named):
        load_model(folder, torch.float32, CPU, progress=False)


@pytest.mark.parametrize(
    ("name", "quantize", "named"),
    [("awq", "int8", "already quantised as awq"), ("gguf", "gptq", "stores its weights as gguf")],
)
def test_a_quantised_checkpoint_is_not_quantised_again(name: str, quantize: str, named: str) -> None:
    with pytest.raises(ModelError, match=named):
        load_model(FIXTURES / name, torch.float32, CPU, progress=False, quantize=quantize)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    folder = copied("gptq", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.qzeros"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"no tensor model\.layers\.0\.mlp\.up_proj\.qzeros"):
        load_model(folder, torch.float32, CPU, progress=False)


def test_gptq_without_g_idx_has_its_inputs_in_order(tmp_path: Path) -> None:
    folder = copied("gptq_v2", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file({k: t for k, t in tensors.items() if not k.endswith("g_idx")}, folder / "model.safetensors")
    change_config(folder, bits="4")
    expected = load_file(folder / "expected.safetensors")
    paged, tokens = PagedModel(folder), expected["tokens"].tolist()
    (logits,) = paged.logits([Chunk(0, tokens, 0, paged.blocks(len(tokens)))])
    torch.testing.assert_close(logits, expected["logits"], atol=1e-4, rtol=0.0)


def test_a_bias_that_the_model_does_not_have_must_be_zero(tmp_path: Path) -> None:
    folder = copied("awq", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.bias"
    save_file({**tensors, name: torch.zeros(64, dtype=torch.float16)}, folder / "model.safetensors")
    load_model(folder, torch.float32, CPU, progress=False)
    save_file({**tensors, name: torch.ones(64, dtype=torch.float16)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"up_proj\.bias"):
        load_model(folder, torch.float32, CPU, progress=False)


@pytest.mark.parametrize("name", NAMES)
def test_the_start_says_size_and_format(name: str) -> None:
    prepared = prepare_model(ModelOptions(FIXTURES / name, CPU, "float32", 16, 1 << 20, None))
    assert f"MiB ({FORMATS[name]})" in str(prepared)


@pytest.mark.parametrize(("name", "kept_bytes"), [("bnb_nf4", 4), ("ct_nvfp4", 4), ("bnb_int8", 1), ("ct_w8a8", 1)])
def test_size_in_memory_counts_numbers_as_they_are_kept(name: str, kept_bytes: int) -> None:
    sizes = loaded_bytes(FIXTURES / name, WeightFormat(FORMATS[name]), number_bytes=4).tensors
    weights = [size for each, size in sizes.items() if "q_proj.weight" in each]
    assert max(weights) == 64 * 128 * kept_bytes


def test_a_gguf_file_has_a_fingerprint_of_its_own(tmp_path: Path) -> None:
    folder = copied("gguf", tmp_path)
    before = model_fingerprint(folder)
    content = bytearray((folder / "model.gguf").read_bytes())
    content[-1] ^= 1
    (folder / "model.gguf").write_bytes(content)
    assert len({before, model_fingerprint(folder), model_fingerprint(FIXTURES / "awq")}) == 3
