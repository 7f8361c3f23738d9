"""Files of published folders: plan, `up`, the offline engine and transformers choose the same weights, or refuse."""

import codecs
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from baton.cli.__main__ import app
from baton.engine import LLM, SamplingParams
from baton.engine.config.config_file import read_model_config
from baton.engine.config.model_config import ModelError
from baton.engine.load import check_tensors
from baton.launch.model_source import ModelNotUsable, find_model
from baton.router.model.defaults import read_generation_defaults
from baton.text.host.files import FileRefused
from baton.text.weight_files import INDEX_FILE, SINGLE_FILE
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.encoders import make_encoder
from tests.fixtures.poolers import pooling_config, write_dense, write_modules

PROMPT = [5, 9, 200, 17, 3, 88]
NOISE = {"model.embed_tokens.weight": torch.zeros(512, 64), "lm_head.weight": torch.ones(512, 64)}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("layouts"), "llama", tie_word_embeddings=True)


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copy"))


def llm(folder: Path) -> LLM:
    return LLM(str(folder), dtype="float32", quiet=True, kv_cache_memory_bytes=1 << 20)


def assert_served_as_by_transformers(folder: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = theirs.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    [answer] = llm(folder).generate([{"prompt_token_ids": PROMPT}], params)
    assert [*PROMPT, *answer.outputs[0].token_ids] == expected[0].tolist()
    assert CliRunner().invoke(app, ["plan", "--model", str(folder)]).exit_code == 0
    assert find_model(str(folder), folder, folder).folder == folder


def rewrite(folder: Path, **changes: Any) -> None:
    """Change fields of config.json; remove those that are `...`."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def split(folder: Path, names: tuple[str, str], indexed: bool) -> None:
    tensors = load_file(folder / SINGLE_FILE)
    (folder / SINGLE_FILE).unlink()
    weight_map = {name: names[index % 2] for index, name in enumerate(sorted(tensors))}
    for part in names:
        save_file({name: tensors[name] for name in tensors if weight_map[name] == part}, folder / part)
    if indexed:
        (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


EXTRA = ("consolidated", "adapter_model", "model.fp16", "model-00001-of-00002", "optimizer", "vision")


@pytest.mark.parametrize("layout", ["single", "indexed", "both", "named", "named index"])
def test_other_files_of_weights_in_a_folder_are_ignored(layout: str, original: Path, folder: Path) -> None:
    if layout == "indexed":
        split(folder, ("Model-1-OF-2.fp16.safetensors", "b.safetensors"), indexed=True)
    if layout == "both":
        (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"x": "gone.safetensors"}}))
    if layout == "named":
        (folder / SINGLE_FILE).rename(folder / "best.safetensors")
        save_file(NOISE, folder / SINGLE_FILE)
        rewrite(folder, transformers_weights="best.safetensors")
    if layout == "named index":
        split(folder, ("a.safetensors", "b.safetensors"), indexed=True)
        (folder / INDEX_FILE).rename(folder / "best.safetensors.index.json")
        save_file(NOISE, folder / SINGLE_FILE)
        rewrite(folder, transformers_weights="best.safetensors.index.json")
    for name in EXTRA:
        save_file(NOISE, folder / f"{name}.safetensors")
    (folder / "damaged.safetensors").write_bytes(b"cut")
    (folder / "params.json").write_text("{}")
    (folder / "training_args.bin").touch()
    assert_served_as_by_transformers(folder)


def without_index(folder: Path) -> str:
    split(folder, ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"), indexed=False)
    return "has neither model.safetensors, model.safetensors.index.json.*of model-00001-of-00002.safetensors, .* none"


def without_a_part(folder: Path) -> str:
    split(folder, ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"), indexed=True)
    (folder / "model-00002-of-00002.safetensors").unlink()
    return "names 'model-00002-of-00002.safetensors', which is not a file in this folder"


def without_all_parts(folder: Path) -> str:
    (folder / SINGLE_FILE).unlink()
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": "gone.safetensors"}}))
    return "names 'gone.safetensors', which is not a file in this folder"


def named_outside(folder: Path) -> str:
    rewrite(folder, transformers_weights="../model.safetensors")
    return "transformers_weights '../model.safetensors' names no safetensors file in this folder"


def named_but_missing(folder: Path) -> str:
    rewrite(folder, transformers_weights="best.safetensors")
    return "best.safetensors: is not a file"


def not_fetched(folder: Path) -> str:
    (folder / SINGLE_FILE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:5f1d\nsize 9\n")
    return "model.safetensors: a pointer of Git LFS instead of the file; fetch it with git lfs pull"


def a_variant(folder: Path) -> str:
    (folder / SINGLE_FILE).rename(folder / "model.fp16.safetensors")
    return "of model.fp16.safetensors none is read"


def an_adapter(folder: Path) -> str:
    (folder / SINGLE_FILE).rename(folder / "adapter_model.safetensors")
    return "of adapter_model.safetensors none is read"


def pickled(folder: Path) -> str:
    (folder / SINGLE_FILE).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    return "pytorch_model.bin: a file of pickled weights, which is not read, .*; convert it to safetensors"


def with_byte_order_mark(folder: Path) -> str:
    path = folder / "config.json"
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    return "config.json: not valid JSON: Unexpected UTF-8 BOM"


def with_empty_settings(folder: Path) -> str:
    rewrite(folder, quantization_config={})
    return "config.json: quantization_config: must not be empty"


def with_empty_weights(folder: Path) -> str:
    (folder / SINGLE_FILE).write_bytes(b"")
    return f"{SINGLE_FILE}: SafetensorError: "


def with_empty_index(folder: Path) -> str:
    (folder / SINGLE_FILE).unlink()
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": {}}))
    return "weight_map is missing or empty"


def with_pickled_parts(folder: Path) -> str:
    (folder / SINGLE_FILE).unlink()
    (folder / "part.bin").touch()
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": "part.bin"}}))
    return "names 'part.bin', a file of pickled weights, which is not read, .*; convert it to safetensors"


def quantised(folder: Path) -> str:
    tensors = load_file(folder / SINGLE_FILE)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name].to(torch.int8)}, folder / SINGLE_FILE, {"format": "pt"})
    return f"{name} is I8, but neither config.json nor"


REFUSALS = (OSError, ValueError, RuntimeError, IndexError, EOFError, SafetensorError)  # of transformers
REFUSED = (
    *(without_index, without_a_part, without_all_parts, not_fetched, a_variant, an_adapter, pickled),
    *(named_outside, named_but_missing),
    *(with_empty_index, with_pickled_parts),
)
REFUSED_BY_CONTENT = (with_byte_order_mark, with_empty_settings, with_empty_weights)


@pytest.mark.parametrize("layout", REFUSED)
def test_folder_without_readable_weights_is_refused_alike(layout: Callable[[Path], str], folder: Path) -> None:
    message = layout(folder)
    planned = CliRunner().invoke(app, ["plan", "--model", str(folder)])
    with pytest.raises(ModelNotUsable, match=message) as by_up:
        find_model(str(folder), folder, folder)
    with pytest.raises(ModelError, match=message) as by_llm:
        llm(folder)
    assert str(planned.exception) == str(by_up.value) == str(by_llm.value)
    with pytest.raises(REFUSALS):
        AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True)


@pytest.mark.parametrize("layout", REFUSED_BY_CONTENT)
def test_folder_of_unreadable_content_is_refused_alike(layout: Callable[[Path], str], folder: Path) -> None:
    message = layout(folder)
    planned = CliRunner().invoke(app, ["plan", "--model", str(folder)])
    with pytest.raises(FileRefused, match=message) as refused:
        llm(folder)
    assert str(planned.exception) == str(refused.value)
    with pytest.raises(REFUSALS):
        AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True)


@pytest.mark.parametrize("written", ["./a.safetensors", "{folder}/a.safetensors", "parts/a.safetensors"])
def test_index_may_spell_paths_in_the_folder_in_any_way(written: str, folder: Path) -> None:
    name = written.format(folder=folder)
    (folder / "parts").mkdir()
    split(folder, (name, name), indexed=True)
    assert_served_as_by_transformers(folder)


def without_prefix(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].flip(0).contiguous()}
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()} | head


def in_float64(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.double() for name, tensor in tensors.items()}


def in_several_dtypes(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    dtypes = (torch.float64, torch.float16, torch.bfloat16, torch.float32)
    return {name: tensor.to(dtypes[index % 4]) for index, (name, tensor) in enumerate(tensors.items())}


@pytest.mark.parametrize("change", [without_prefix, in_float64, in_several_dtypes])
def test_tensors_that_transformers_reads_give_its_answer(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], folder: Path
) -> None:
    save_file(change(load_file(folder / SINGLE_FILE)), folder / SINGLE_FILE, {"format": "pt"})
    assert_served_as_by_transformers(folder)


FORMS_OF_ROTATION: list[dict[str, Any]] = [
    {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_theta": 1e4, "rope_scaling": {"type": "default", "rope_type": "linear", "factor": 2.0}},
    {"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
    {"rope_theta": 1e4, "rope_scaling": {}},
    {"rope_theta": 1e4, "rope_scaling": None},
    {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
    {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
]
SPELLINGS: list[dict[str, Any]] = [
    {"head_dim": None},
    {"architectures": None},
    {"tie_word_embeddings": ...},
    {"eos_token_id": [2, 3]},
    {"dtype": ..., "torch_dtype": "float16"},
    {"dtype": "bfloat16", "torch_dtype": "float32"},
    {"quantization_config": None},
]


@pytest.mark.parametrize("form", FORMS_OF_ROTATION)
def test_form_of_rotation_gives_the_answer_of_transformers(form: dict[str, Any], folder: Path) -> None:
    rewrite(folder, rope_parameters=...)
    rewrite(folder, **form)
    assert_served_as_by_transformers(folder)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spelling_of_config_json_gives_the_answer_of_transformers(spelling: dict[str, Any], folder: Path) -> None:
    if "tie_word_embeddings" in spelling:
        save_file(without_prefix(load_file(folder / SINGLE_FILE)), folder / SINGLE_FILE, {"format": "pt"})
    rewrite(folder, **spelling)
    assert_served_as_by_transformers(folder)


def test_mistral_with_kinds_of_layers_gives_the_answer_of_transformers(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "mistral", sliding_window=3)
    rewrite(folder, layer_types=["full_attention", "sliding_attention"] * 2)
    assert_served_as_by_transformers(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe"])
def test_generation_config_that_is_no_json_counts_as_missing(content: bytes, folder: Path) -> None:
    (folder / "generation_config.json").write_bytes(content)
    assert_served_as_by_transformers(folder)
    assert llm(folder).get_default_sampling_params() == SamplingParams()
    assert read_generation_defaults(folder).eos_token_ids == llm(folder).eos_token_ids


def test_damaged_special_tokens_next_to_added_tokens_count_as_missing(folder: Path) -> None:
    (folder / "special_tokens_map.json").write_text("{")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "added_tokens_decoder": {}}))
    assert_served_as_by_transformers(folder)


def test_index_that_names_a_file_outside_the_folder_is_refused(folder: Path) -> None:
    split(folder, ("../a.safetensors", "b.safetensors"), indexed=True)
    with pytest.raises(ModelError, match=r"names '\.\./a\.safetensors', which is not a file in this folder"):
        llm(folder)


def test_plan_of_config_json_ignores_other_files_next_to_it(folder: Path) -> None:
    (folder / SINGLE_FILE).rename(folder / "training_args.bin")
    assert CliRunner().invoke(app, ["plan", "--model", str(folder / "config.json")]).exit_code == 0


def test_linear_layer_without_weights_is_refused_by_plan(tmp_path: Path) -> None:
    folder = write_dense(make_encoder(tmp_path / "model", "gemma3_text", seed=1), [torch.zeros(8, 64)])
    (folder / "2_Dense" / SINGLE_FILE).rename(folder / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"2_Dense/model\.safetensors: is missing; pickled weights are not read"):
        check_tensors(folder, read_model_config(folder))


def test_quantised_weights_without_settings_are_refused_alike(folder: Path) -> None:
    message = quantised(folder)
    planned = CliRunner().invoke(app, ["plan", "--model", str(folder)])
    with pytest.raises(ModelError, match=message) as refused:
        llm(folder)
    assert str(planned.exception) == str(refused.value)


@pytest.mark.parametrize("name", ["modules.json", "1_Pooling/config.json", "config_sentence_transformers.json"])
def test_damaged_file_of_sentence_transformers_is_refused_alike(name: str, folder: Path) -> None:
    write_modules(folder, pooling_config("mean"), normalises=True)
    (folder / name).write_text("")
    planned = CliRunner().invoke(app, ["plan", "--model", str(folder)])
    with pytest.raises(FileRefused, match=f"{folder / name}: is empty") as refused:
        llm(folder)
    assert str(planned.exception) == str(refused.value)


def test_files_of_sentence_transformers_are_read_for_a_decoder(folder: Path) -> None:
    write_modules(folder, pooling_config("mean"), normalises=True)
    assert read_model_config(folder).makes_answers
