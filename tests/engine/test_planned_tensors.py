"""Tensors of quantised checkpoints: plan refuses the files that loading refuses, with the same message."""

import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.config.config_file import read_model_config
from baton.engine.config.model_config import ModelError
from baton.engine.load import check_tensors, load_model
from baton.engine.weights.files import loaded_bytes
from baton.engine.weights.formats import WeightFormat
from baton.text.gguf.folder import folder_of
from baton.text.gguf.header import GgufHeader, read_header
from baton.text.weight_files import SINGLE_FILE
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.encoders import make_encoder
from tests.fixtures.paged import CPU
from tests.fixtures.poolers import write_dense

FIXTURES = Path(__file__).parents[1] / "fixtures"
QUANTISED = ("awq", "gptq", "gptq_v2", "bnb_nf4", "bnb_nf4_nested", "bnb_int8", "ct_w4a16_zeros", "ct_w8a16")
GGUF = sorted(path.stem for path in (FIXTURES / "gguf").glob("*.gguf"))
Tensors = dict[str, torch.Tensor]


def without(tensors: Tensors, name: str) -> Tensors:
    return {each: tensor for each, tensor in tensors.items() if each != name}


def renamed(tensors: Tensors, name: str) -> Tensors:
    return {f"{each}s" if each == name else each: tensor for each, tensor in tensors.items()}


def cut(tensors: Tensors, name: str) -> Tensors:
    return {**tensors, name: tensors[name][..., :-1].contiguous()}


def refusal(check: Callable[[], object]) -> str | None:
    try:
        check()
    except ModelError as error:
        return str(error)
    return None


def refusals(folder: Path) -> tuple[str | None, str | None]:
    config = read_model_config(folder)
    planned = refusal(lambda: check_tensors(folder, config))
    return planned, refusal(lambda: load_model(folder, torch.float32, CPU, progress=False))


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    return lambda name: Path(shutil.copytree(FIXTURES / "quantized" / name, tmp_path / name))


@pytest.mark.parametrize("change", [without, renamed, cut])
@pytest.mark.parametrize("name", QUANTISED)
def test_changed_tensor_of_a_quantised_checkpoint_is_refused_alike(
    name: str, change: Callable[[Tensors, str], Tensors], copied: Callable[[str], Path]
) -> None:
    folder = copied(name)
    assert refusals(folder) == (None, None)
    whole = load_file(folder / SINGLE_FILE)
    tensors = [each for each in whole if "up_proj" in each or "q_proj" in each or each == "model.norm.weight"]
    messages = []
    for tensor in tensors:
        save_file(change(whole, tensor), folder / SINGLE_FILE)
        planned, loaded = refusals(folder)
        assert planned == loaded, tensor
        messages.append(planned)
    assert len(messages) - messages.count(None) > 2


@pytest.mark.parametrize("change", [without, renamed, cut])
@pytest.mark.parametrize("family", ["gpt2", "bert", "modernbert", "nomic_bert", "xlm-roberta"])
def test_changed_tensor_of_transformers_code_is_refused_alike(
    family: str, change: Callable[[Tensors, str], Tensors], tmp_path: Path
) -> None:
    make: Callable[[Path, str], Path] = make_checkpoint if family == "gpt2" else make_encoder
    folder = make(tmp_path / "model", family)
    assert refusals(folder) == (None, None)
    whole = load_file(folder / SINGLE_FILE)
    for tensor in [name for name in whole if "pooler" not in name][::4]:
        save_file(change(whole, tensor), folder / SINGLE_FILE, {"format": "pt"})
        planned, loaded = refusals(folder)
        assert planned is not None and planned == loaded, tensor


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_head_that_a_checkpoint_lacks_is_refused_alike(family: str, tmp_path: Path) -> None:
    folder = make_encoder(tmp_path / "model", family, labels=1)
    tensors = load_file(folder / SINGLE_FILE)
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("classifier")}
    save_file(kept, folder / SINGLE_FILE, {"format": "pt"})
    planned, loaded = refusals(folder)
    assert planned == loaded
    assert planned is not None and "missing keys, among them classifier" in planned


@pytest.mark.parametrize(("name", "shape"), [("linear.weight", (8, 63)), ("linear.bias", (8,)), ("weight", (8, 64))])
def test_changed_linear_layer_of_an_encoder_is_refused_alike(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    folder = write_dense(make_encoder(tmp_path / "model", "gemma3_text", seed=1), [torch.zeros(8, 64)])
    save_file({name: torch.zeros(shape)}, folder / "2_Dense" / SINGLE_FILE)
    planned, loaded = refusals(folder)
    assert planned == loaded
    assert (planned is None) == (name == "weight")  # the prefix of the names is optional


@pytest.mark.parametrize(
    ("name", "tensor", "content", "message"),
    [
        ("gptq", "up_proj.g_idx", torch.zeros(64, dtype=torch.int32), r"g_idx does not put 16 inputs into each of 4"),
        ("awq", "up_proj.bias", torch.ones(64, dtype=torch.float16), r"has .*up_proj\.bias, which this model does not"),
        (
            "bnb_nf4",
            "up_proj.weight.quant_state.bitsandbytes__nf4",
            torch.tensor(list(b"{}"), dtype=torch.uint8),
            "lacks 'blocksize'",
        ),
    ],
)
def test_content_that_loading_refuses_is_refused_by_plan(
    name: str, tensor: str, content: torch.Tensor, message: str, copied: Callable[[str], Path]
) -> None:
    folder = copied(name)
    save_file(load_file(folder / SINGLE_FILE) | {f"model.layers.0.mlp.{tensor}": content}, folder / SINGLE_FILE)
    config = read_model_config(folder)
    with pytest.raises(ModelError, match=message) as planned:
        check_tensors(folder, config)
    with pytest.raises(ModelError, match=message) as loaded:
        load_model(folder, torch.float32, CPU, progress=False)
    assert str(planned.value) == str(loaded.value)


def changes(header: GgufHeader) -> Iterator[tuple[bytes, bytes]]:
    """Yield bytes of a header, and others that rename a tensor of the first layer or shorten it by one row."""
    for name, tensor in header.tensors.items():
        if name.startswith("blk.0.") or "blk" not in name:
            described = name.encode() + struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape[::-1])
            yield described, described.replace(name.encode(), f"{name[:-1]}x".encode())
            rows, *columns = tensor.shape
            if columns:
                shape = [*columns[::-1], rows - 1]
                yield described, name.encode() + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)


@pytest.mark.parametrize("name", GGUF)
def test_gguf_file_is_accepted_by_plan(name: str, copied: Callable[[str], Path]) -> None:
    folder = folder_of(FIXTURES / "gguf" / f"{name}.gguf")
    check_tensors(folder, read_model_config(folder))


@pytest.mark.parametrize("name", ["llama", "qwen3moe", "gemma4", "deepseek2", "qwen35", "bert", "nomic-bert"])
def test_changed_tensor_of_a_gguf_file_is_refused_alike(
    name: str, copied: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(folder_of(FIXTURES / "gguf" / f"{name}.gguf"), tmp_path / "folder"))
    path = folder / f"{name}.gguf"
    content, refused = path.read_bytes(), 0
    for before, after in changes(read_header(path)):
        assert content.count(before) == 1
        path.write_bytes(content.replace(before, after))
        planned, loaded = refusals(folder)
        assert planned == loaded, after
        refused += planned is not None
    assert refused > 10


def test_size_of_8_bit_codes_is_that_of_expanded_weights() -> None:
    folder = FIXTURES / "quantized" / "ct_w8a16"
    sizes = loaded_bytes(folder, WeightFormat.COMPRESSED, number_bytes=4).tensors
    assert sizes["model.layers.0.self_attn.q_proj.weight_packed"] == 64 * 128 * 4
    kept = loaded_bytes(FIXTURES / "quantized" / "ct_w4a16", WeightFormat.COMPRESSED, number_bytes=4).tensors
    assert kept["model.layers.0.self_attn.q_proj.weight_packed"] == 64 * 128 // 2


def test_zero_points_in_another_part_count_as_expanded(copied: Callable[[str], Path]) -> None:
    folder = copied("ct_w8a8")
    tensors = load_file(folder / SINGLE_FILE)
    (folder / SINGLE_FILE).unlink()
    name = next(each for each, tensor in tensors.items() if tensor.dtype == torch.int8)
    zeros = {f"{name}_zero_point": torch.zeros(len(tensors[name]), 1, dtype=torch.int8)}
    for part, stored in (("a", tensors), ("b", zeros)):
        save_file(stored, folder / f"{part}.safetensors")
    weight_map = {**dict.fromkeys(tensors, "a.safetensors"), **dict.fromkeys(zeros, "b.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    sizes = loaded_bytes(folder, WeightFormat.COMPRESSED, number_bytes=4).tensors
    assert sizes[name] == 4 * tensors[name].numel()
