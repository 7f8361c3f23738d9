"""Loading safetensors and recognising a checkpoint."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from baton.engine.config.config_file import read_model_config
from baton.engine.config.families import FAMILIES as DECODERS
from baton.engine.config.model_config import ModelError
from baton.engine.load import check_tensors, load_model
from baton.engine.weights.files import loaded_bytes, model_fingerprint
from baton.engine.weights.formats import WeightFormat
from baton.text.weight_files import INDEX_FILE, SINGLE_FILE
from tests.fixtures.checkpoints import FAMILIES as MADE
from tests.fixtures.checkpoints import make_checkpoint

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("weights"), "qwen2")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copy"))


def shard(folder: Path) -> None:
    tensors = load_file(folder / SINGLE_FILE)
    (folder / SINGLE_FILE).unlink()
    weight_map = {name: f"part-{index % 3}.safetensors" for index, name in enumerate(sorted(tensors))}
    for part in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == part}, folder / part)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


def test_projections_are_fused_in_order(folder: Path) -> None:
    model = load_model(folder, torch.float32, CPU, progress=False)
    tensors = load_file(folder / SINGLE_FILE)
    prefix = "model.layers.2.self_attn."
    names = [f"{prefix}{name}_proj" for name in "qkv"]
    torch.testing.assert_close(model.layers[2].qkv.weight, torch.cat([tensors[f"{name}.weight"] for name in names]))
    torch.testing.assert_close(model.layers[2].qkv.bias, torch.cat([tensors[f"{name}.bias"] for name in names]))


def test_weights_are_cast_on_load(folder: Path) -> None:
    model = load_model(folder, torch.bfloat16, CPU, progress=False)
    assert {model.dtype, model.layers[0].qkv.weight.dtype, model.norm.weight.dtype} == {torch.bfloat16}
    assert model.rope.frequencies.dtype == torch.float32


def test_a_tied_head_is_the_embedding_itself(folder: Path) -> None:
    model = load_model(folder, torch.float32, CPU, progress=False)
    assert model.head.weight.data_ptr() == model.embedding.weight.data_ptr()


@pytest.mark.parametrize("sharded", [False, True])
def test_head_that_differs_from_a_tied_embedding_is_used_as_in_transformers(folder: Path, sharded: bool) -> None:
    tensors = load_file(folder / SINGLE_FILE)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if sharded:
        shard(folder)
    model = load_model(folder, torch.float32, CPU, progress=False)
    assert torch.equal(model.head.weight, theirs.lm_head.weight)
    assert torch.equal(model.embedding.weight, theirs.model.embed_tokens.weight)


def test_head_that_equals_a_tied_embedding_takes_no_memory(folder: Path) -> None:
    tensors = load_file(folder / SINGLE_FILE)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / SINGLE_FILE)
    model = load_model(folder, torch.float32, CPU, progress=False)
    assert model.head.weight.data_ptr() == model.embedding.weight.data_ptr()


def test_head_without_an_embedding_is_the_embedding_too_if_tied(folder: Path) -> None:
    before = load_model(folder, torch.float32, CPU, progress=False)
    size_bytes = loaded_bytes(folder, WeightFormat.PLAIN, 4)
    tensors = load_file(folder / SINGLE_FILE)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = load_model(folder, torch.float32, CPU, progress=False)
    assert torch.equal(model.embedding.weight, theirs.model.embed_tokens.weight)
    assert torch.equal(model.embedding.weight, before.embedding.weight)
    found = loaded_bytes(folder, WeightFormat.PLAIN, 4)
    assert (found.total, found.embedding, found.head) == (size_bytes.total, size_bytes.embedding, 0)


def test_shards_are_read_through_their_index(folder: Path) -> None:
    whole = load_model(folder, torch.float32, CPU, progress=False)
    shard(folder)
    parts = load_model(folder, torch.float32, CPU, progress=False)
    torch.testing.assert_close(parts.layers[3].feed_forward.gate_up.weight, whole.layers[3].feed_forward.gate_up.weight)


def test_an_index_may_not_lead_out_of_the_folder(folder: Path) -> None:
    (folder / SINGLE_FILE).unlink()
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"x": "../copy/model.safetensors"}}))
    with pytest.raises(ModelError, match="not a file in this folder"):
        load_model(folder, torch.float32, CPU, progress=False)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    tensors = load_file(folder / SINGLE_FILE)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / SINGLE_FILE)
    with pytest.raises(ModelError, match=r"no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(folder, torch.float32, CPU, progress=False)


@pytest.mark.parametrize("family", sorted((DECODERS.keys() & MADE.keys()) - {"gemma4_text"}))
def test_tensors_of_a_family_are_checked_without_reading_them(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, family)
    config = read_model_config(folder)
    check_tensors(folder, config)
    tensors = load_file(folder / SINGLE_FILE)
    changes = ({max(tensors): tensors[max(tensors)][..., :-1]}, {"model.surplus": torch.zeros(2)}, {max(tensors): None})
    for change in changes:
        kept = {name: tensor for name, tensor in {**tensors, **change}.items() if tensor is not None}
        save_file({name: tensor.contiguous() for name, tensor in kept.items()}, folder / SINGLE_FILE, {"format": "pt"})
        with pytest.raises(ModelError) as by_check:
            check_tensors(folder, config)
        with pytest.raises(ModelError) as by_load:
            load_model(folder, torch.float32, CPU, progress=False)
        assert str(by_check.value) == str(by_load.value)


def test_an_absent_head_that_is_not_tied_is_named(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", tie_word_embeddings=False)
    tensors = load_file(folder / SINGLE_FILE)
    del tensors["lm_head.weight"]
    save_file(tensors, folder / SINGLE_FILE)
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        load_model(folder, torch.float32, CPU, progress=False)


@pytest.mark.parametrize(
    ("name", "tensor", "named"),
    [
        ("model.layers.0.mlp.gate_proj.bias", torch.zeros(176), "does not use.*gate_proj.bias"),
        ("model.norm.weight", torch.zeros(65), r"\[65\].*\[64\]"),
        ("model.norm.weight", torch.zeros(64, dtype=torch.int8), "int8"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(folder: Path, name: str, tensor: torch.Tensor, named: str) -> None:
    save_file({**load_file(folder / SINGLE_FILE), name: tensor}, folder / SINGLE_FILE)
    with pytest.raises(ModelError, match=named):
        load_model(folder, torch.float32, CPU, progress=False)


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"\x10\x00\x00\x00\x00\x00\x00\x00not json at all!"])
def test_a_broken_file_is_named(folder: Path, content: bytes) -> None:
    (folder / SINGLE_FILE).write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load_model(folder, torch.float32, CPU, progress=False)


def test_the_progress_bar_shows_when_asked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_model(folder, torch.float32, CPU, progress=False)
    assert capsys.readouterr().err == ""
    load_model(folder, torch.float32, CPU, progress=True)
    assert "100%" in capsys.readouterr().err


def test_fingerprints_are_equal_for_a_copy_whatever_wrote_its_config(original: Path, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["transformers_version"] = "9.9"
    (folder / "config.json").write_text(json.dumps(dict(reversed(config.items()))))
    assert model_fingerprint(folder) == model_fingerprint(original)
    assert len(model_fingerprint(folder)) == 32


def test_fingerprints_differ_for_another_seed_dtype_or_config(original: Path, folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    prints = {
        model_fingerprint(original),
        model_fingerprint(folder),
        model_fingerprint(make_checkpoint(tmp_path / "seed", "qwen2", seed=1)),
        model_fingerprint(make_checkpoint(tmp_path / "dtype", "qwen2", dtype="bfloat16")),
    }
    assert len(prints) == 4


def test_a_fingerprint_sees_the_end_of_a_large_file(folder: Path) -> None:
    before = model_fingerprint(folder)
    content = bytearray((folder / SINGLE_FILE).read_bytes())
    content[-1] ^= 1
    (folder / SINGLE_FILE).write_bytes(content)
    assert model_fingerprint(folder) != before
