"""From what the user calls a model to a folder."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.launch import CommandFailed
from baton.launch.model_source import ModelNotUsable, find_adapters, find_model, has_chat_template
from baton.launch.tiny_checkpoint import write_tiny_checkpoint
from baton.text.model_folder import DESCRIBING_FILES, MODEL_FILES


def test_find_model_folder_is_named_by_itself(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "my-model")
    source = find_model(str(tmp_path / "my-model"), tmp_path, tmp_path)
    assert (source.folder, source.name, source.is_random) == (tmp_path / "my-model", "my-model", False)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_find_model_incomplete_folder_names_missing_file(tmp_path: Path, missing: str) -> None:
    write_tiny_checkpoint(tmp_path / "broken")
    (tmp_path / "broken" / missing).unlink()
    with pytest.raises(ModelNotUsable, match=missing.removeprefix("model")):
        find_model(str(tmp_path / "broken"), tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("files", "given", "message"),
    [
        (["m.gguf"], "m.gguf", r"m\.gguf: not a GGUF file"),
        (["model.safetensors"], "model.safetensors", r"a file of weights without config\.json"),
        (["model.safetensors", "config.json"], "model.safetensors", "a file of weights, and a model is its folder"),
        (["pytorch_model.bin"], "pytorch_model.bin", "pickled weights, which is not read, since .*; convert it to"),
        (["model.PT"], "model.PT", "a file of pickled weights"),
        (["notes.txt"], "notes.txt", "not a folder; give the folder of a checkpoint"),
        ([], ".", "is empty; give the folder of a checkpoint"),
        (["a-Q4_0.gguf", "a-Q8_0.gguf"], ".", r"has several models \(a-Q4_0\.gguf, a-Q8_0\.gguf\); give one"),
        (["a-00001-of-00002.gguf"], ".", r"of which a-00002-of-00002\.gguf is missing"),
        (["config.json", "tokenizer.json", "pytorch_model.bin"], ".", r"pytorch_model\.bin: a file of pickled weights"),
    ],
)
def test_find_model_of_unsupported_weights_names_them_and_the_remedy(
    tmp_path: Path, files: list[str], given: str, message: str
) -> None:
    folder = tmp_path / "given"
    folder.mkdir()
    for name in files:
        (folder / name).write_text("{}" if name.endswith(".json") else "")
    with pytest.raises(ModelNotUsable, match=message) as refused:
        find_model(str(folder / given), tmp_path, tmp_path)
    assert "no such folder" not in str(refused.value)


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "nowhere", "a/b/c"])
def test_find_model_unknown_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelNotUsable, match="no such folder"):
        find_model(name, tmp_path, tmp_path)


def test_find_model_hub_without_network_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelNotUsable, match="hub cannot be reached"):
        find_model("owner/name", tmp_path, tmp_path)


def test_plan_and_up_without_network_fail_with_the_same_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    from baton.cli.plan import config_folder

    asked: list[list[str]] = []

    def offline(hub_id: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    said = []
    for look in (lambda name: find_model(name, tmp_path, tmp_path), config_folder):
        with pytest.raises(ModelNotUsable) as caught:
            look("owner/name")
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert asked == [[*MODEL_FILES], [*DESCRIBING_FILES]]


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("adapter_config.json", "is a LoRA adapter; give its base model, and --adapter NAME="),
        ("params.json", r"is in Mistral's own format \(params\.json\); give the checkpoint in Hugging Face's format"),
        ("notes.md", r"is not a checkpoint: it has no config\.json"),
    ],
)
def test_folder_without_config_is_rejected_by_plan_up_and_offline(file: str, message: str, tmp_path: Path) -> None:
    from baton.cli.plan import config_folder
    from baton.engine import LLM

    (tmp_path / file).touch()
    (tmp_path / "consolidated.safetensors").touch()
    asked: list[tuple[Callable[[str], object], type[Exception]]] = [
        (lambda name: find_model(name, tmp_path, tmp_path), ModelNotUsable),
        (config_folder, CommandFailed),
        (LLM, ValueError),
    ]
    for look, kind in asked:
        with pytest.raises(kind, match=f"^{tmp_path} {message}"):
            look(str(tmp_path))


def test_config_folder_accepts_folder_or_config(tmp_path: Path) -> None:
    from baton.cli.plan import config_folder

    (tmp_path / "config.json").write_text("{}")
    assert config_folder(str(tmp_path)) == config_folder(str(tmp_path / "config.json")) == tmp_path


def test_find_model_hub_fetches_only_safe_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    write_tiny_checkpoint(tmp_path / "snapshot")
    patterns: list[str] = []

    def download(hub_id: str, allow_patterns: list[str]) -> str:
        patterns.extend(allow_patterns)
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert find_model("owner/name", tmp_path, tmp_path).name == "owner/name"
    assert not any(pattern.endswith((".bin", ".pt", ".py", ".pth")) for pattern in patterns)


def test_find_adapters_needs_unique_names_of_peft_folders(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    [adapter] = find_adapters([f"sql={tmp_path}"], "base")
    assert (adapter.name, adapter.folder) == ("sql", tmp_path)
    for given, message in (
        ([f"base={tmp_path}"], "base is the name of the model"),
        ([f"sql={tmp_path / 'nowhere'}"], "no adapter_config"),
        ([str(tmp_path)], "NAME=FOLDER"),
        ([f"sql={tmp_path}", f"sql={tmp_path}"], "given twice"),
    ):
        with pytest.raises(CommandFailed, match=message):
            find_adapters(given, "base")


def test_find_model_without_name_is_the_demo(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "models" / "tableqa")
    source = find_model(None, tmp_path, tmp_path / "scratch")
    assert (source.name, source.is_random) == ("tableqa", False)


def test_find_model_without_demo_is_random(tmp_path: Path) -> None:
    source = find_model(None, tmp_path, tmp_path / "scratch")
    assert (source.name, source.is_random) == ("tiny-random", True)
    assert json.loads((source.folder / "config.json").read_text())["model_type"] == "llama"


def test_tiny_checkpoint_loads_completely_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_tiny_checkpoint(tmp_path)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "Zoë: <|im_end|>"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert len(tokenizer) == model.config.vocab_size


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("chat_template.jinja", "{{ messages }}", True),
        ("chat_template.json", '{"chat_template": "{{ messages }}"}', True),
        ("tokenizer_config.json", '{"chat_template": "{{ messages }}"}', True),
        ("tokenizer_config.json", '{"bos_token": "<s>"}', False),
        ("tokenizer_config.json", "not json", False),
    ],
)
def test_has_chat_template_reads_all_files(tmp_path: Path, name: str, content: str, expected: bool) -> None:
    write_tiny_checkpoint(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / name).write_text(content)
    assert has_chat_template(tmp_path) is expected
