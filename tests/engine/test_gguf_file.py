"""GGUF: block formats against the package `gguf`, and files that are not what they say."""

import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from baton.engine.config.model_config import ModelError
from baton.engine.load import load_model
from baton.engine.weights.files import weight_files
from baton.engine.weights.gguf_file import dequantise
from baton.engine.weights.gguf_names import gguf_names
from baton.text.gguf.header import GgufRefused, TensorType, read_header

FIXTURES = Path(__file__).parents[1] / "fixtures" / "quantized"
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / "gguf", tmp_path / "gguf"))


def patched(folder: Path, before: bytes, after: bytes) -> Path:
    path = folder / "model.gguf"
    content = path.read_bytes()
    assert before in content
    path.write_bytes(content.replace(before, after, 1))
    return path


@pytest.mark.parametrize("kind", [kind for kind in TensorType if kind is not TensorType.F32])
def test_random_blocks_give_the_numbers_that_gguf_makes_of_them(kind: TensorType) -> None:
    blocks = load_file(FIXTURES / "blocks.safetensors")
    found = dequantise(blocks[f"{kind.name}.stored"], kind)
    torch.testing.assert_close(found, blocks[f"{kind.name}.numbers"], rtol=0.0, atol=0.0, equal_nan=True)


def test_a_header_is_read_as_written(folder: Path) -> None:
    header = read_header(folder / "model.gguf")
    assert header.architecture == "llama"
    assert header.tensors["blk.0.attn_q.weight"].shape == (64, 256)
    assert header.tensors["blk.0.attn_q.weight"].type is TensorType.Q4_K
    assert header.tensors["output_norm.weight"].shape == (256,)


def test_names_are_llama_cpps() -> None:
    assert gguf_names("model.layers.12.self_attn.q_norm.weight") == ("blk.12.attn_q_norm.weight",)
    assert gguf_names("model.layers.3.mlp.down_proj.weight") == ("blk.3.ffn_down.weight",)
    assert gguf_names("model.layers.3.mlp.experts.7.down_proj.weight") == ("blk.3.ffn_down_exps.weight",)
    assert gguf_names("lm_head.weight") == ("output.weight",)
    assert gguf_names("model.layers.3.mlp.unknown.weight") == ()


@pytest.mark.parametrize("size", [5, 20, 300, 70_000])
def test_a_file_cut_short_is_refused(folder: Path, size: int) -> None:
    path = folder / "model.gguf"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(GgufRefused, match="cut short"):
        read_header(path)


@pytest.mark.parametrize("content", [b"GGML", b"\x00" * 64, b"GGUF" + struct.pack("<I", 9) + b"\x00" * 64])
def test_another_format_is_refused(folder: Path, content: bytes) -> None:
    (folder / "model.gguf").write_bytes(content)
    with pytest.raises(GgufRefused, match="not a GGUF file"):
        read_header(folder / "model.gguf")


def test_an_absurd_count_is_refused_before_it_is_believed(folder: Path) -> None:
    (folder / "model.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1) + b"\x00" * 64)
    with pytest.raises(GgufRefused, match="the header announces"):
        read_header(folder / "model.gguf")


def test_an_unread_type_is_named(folder: Path) -> None:
    name = b"blk.0.ffn_down.weight"
    info = name + struct.pack("<IQQI", 2, 32, 256, TensorType.Q8_0)
    path = patched(folder, info, info[:-4] + struct.pack("<I", 34))
    with pytest.raises(GgufRefused, match=r"ffn_down\.weight has ggml type TQ1_0; supported are F32"):
        read_header(path)


def test_a_tensor_of_another_shape_is_named(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 32', '"intermediate_size": 64'))
    with pytest.raises(ModelError, match=r"ffn_gate\.weight is \[32, 256\], config\.json implies \[64, 256\]"):
        load_model(folder, torch.float32, CPU, progress=False)


def test_another_architecture_than_that_of_the_configuration_is_refused(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"model_type": "llama"', '"model_type": "qwen2"'))
    with pytest.raises(ModelError, match=r"architecture 'llama' does not fit config\.json's 'qwen2'"):
        load_model(folder, torch.float32, CPU, progress=False)


def test_a_tensor_that_nobody_asked_for_is_refused(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    load_model(folder, torch.float32, CPU, progress=False)  # a head beside a tied one is only left aside
    patched(folder, b"output_norm.weight", b"output_nork.weight")
    with pytest.raises(ModelError, match="no tensor output_norm"):
        load_model(folder, torch.float32, CPU, progress=False)


def test_two_files_are_no_model(folder: Path) -> None:
    shutil.copy(folder / "model.gguf", folder / "other.gguf")
    with pytest.raises(ModelError, match=r"has several models \(model\.gguf, other\.gguf\); give one of these files"):
        weight_files(folder)
