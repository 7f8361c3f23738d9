"""Files that are downloaded from the Hugging Face hub: those that are loaded, and no others."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]
from huggingface_hub.utils import filter_repo_objects

from baton.launch.tiny_checkpoint import write_tiny_checkpoint
from baton.text.model_folder import NoSuchModel, check_complete, check_config, find_adapter_folder, find_model_folder
from baton.text.weight_files import INDEX_FILE, SINGLE_FILE, has_weights, weight_files

GGUF = Path(__file__).parents[1] / "fixtures" / "gguf"
OTHERS = (
    *("README.md", ".gitattributes", "LICENSE", "modeling_own.py", "params.txt", "training_args.bin"),
    *("pytorch_model.bin", "tf_model.h5", "flax_model.msgpack", "model.fp16.safetensors", "adapter_model.safetensors"),
    *("consolidated.safetensors", "consolidated-00001-of-00002.safetensors", "consolidated.safetensors.index.json"),
    *("consolidated.00.pth", "original/consolidated.00.pth", "original/model.safetensors", "original/tokenizer.model"),
    *("original/params.json", "onnx/model.onnx", "onnx/config.json", "openvino/openvino_model.bin", "metal/model.bin"),
    *("checkpoint-5/model.safetensors", "2_Dense/pytorch_model.bin", "m-Q4_K_M.gguf", "runs/events.json"),
)
PARTS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


class FakeHub:
    """Repository whose files are copied by downloads, as by huggingface_hub."""

    def __init__(self, folder: Path) -> None:
        self.published = folder / "published"
        self.snapshot = folder / "snapshot"
        self.snapshot.mkdir()
        self.is_reachable = True

    @property
    def files(self) -> list[str]:
        return [str(each.relative_to(self.published)) for each in self.published.rglob("*") if each.is_file()]

    @property
    def fetched(self) -> set[str]:
        return {str(each.relative_to(self.snapshot)) for each in self.snapshot.rglob("*") if each.is_file()}

    def add(self, *names: str) -> None:
        for name in names:
            (self.published / name).parent.mkdir(parents=True, exist_ok=True)
            (self.published / name).write_text("{}")

    def download(
        self, hub_id: str, allow_patterns: list[str], revision: str | None = None, local_files_only: bool = False
    ) -> str:
        assert revision in (None, self.snapshot.name)
        for name in filter_repo_objects(self.files, allow_patterns=allow_patterns) if self.is_reachable else ():
            (self.snapshot / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.published / name, self.snapshot / name)
        return str(self.snapshot)

    def list(self) -> list[str]:
        if not self.is_reachable:
            raise HTTPError("no network")
        return self.files


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    made = FakeHub(tmp_path)
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.download)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda self, hub_id: made.list())
    return made


def single(hub: FakeHub) -> set[str]:
    return {SINGLE_FILE}


def sharded(hub: FakeHub) -> set[str]:
    (hub.published / SINGLE_FILE).unlink()
    hub.add(*PARTS)
    (hub.published / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": PARTS[0], "b": PARTS[1]}}))
    return {INDEX_FILE, *PARTS}


def named(hub: FakeHub) -> set[str]:
    config = hub.published / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "transformers_weights": "best.safetensors"}))
    (hub.published / SINGLE_FILE).rename(hub.published / "best.safetensors")
    return {"best.safetensors"}


def of_sentence_transformers(hub: FakeHub) -> set[str]:
    files = {"modules.json", "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"}
    hub.add(*files)
    return {*files, SINGLE_FILE}


@pytest.mark.parametrize("layout", [single, sharded, named, of_sentence_transformers])
def test_download_of_a_checkpoint_fetches_only_what_is_loaded(
    layout: Callable[[FakeHub], set[str]], hub: FakeHub
) -> None:
    write_tiny_checkpoint(hub.published)
    described = set(hub.files) - {SINGLE_FILE}
    loaded = layout(hub)
    hub.add(*OTHERS)
    folder = find_model_folder("owner/name")
    assert hub.fetched == described | loaded
    assert {path.name for path in weight_files(folder)} <= loaded
    if layout is single:
        check_complete(folder)


def test_weights_of_an_interrupted_download_do_not_count(hub: FakeHub) -> None:
    write_tiny_checkpoint(hub.published)
    sharded(hub)
    folder = find_model_folder("owner/name")
    assert has_weights(folder)
    (folder / PARTS[1]).unlink()
    assert not has_weights(folder)


def test_download_for_a_plan_fetches_no_weights(hub: FakeHub) -> None:
    write_tiny_checkpoint(hub.published)
    described = set(hub.files) - {SINGLE_FILE}
    hub.add(*OTHERS, INDEX_FILE, *PARTS)
    assert find_model_folder("owner/name", with_weights=False) == hub.snapshot
    assert hub.fetched == described


@pytest.mark.parametrize("with_weights", [True, False])
def test_gguf_file_is_chosen_of_a_repository_that_also_has_a_config(with_weights: bool, hub: FakeHub) -> None:
    hub.add("config.json", "mmproj-F16.gguf", "q3-Q8_0.gguf", "q3-Q2_K.gguf")
    shutil.copy(GGUF / "qwen3.gguf", hub.published / "q3-Q4_K_M.gguf")
    folder = find_model_folder("owner/name", with_weights)
    assert hub.fetched == {"config.json", "q3-Q4_K_M.gguf"}
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3"


def test_downloaded_gguf_file_is_found_without_network(hub: FakeHub) -> None:
    hub.published.mkdir()
    shutil.copy(GGUF / "llama.gguf", hub.published / "m-Q8_0.gguf")
    folder = find_model_folder("owner/name:Q8_0")
    hub.is_reachable = False
    assert find_model_folder("owner/name:Q8_0") == find_model_folder("owner/name") == folder


def test_adapter_on_the_hub_is_downloaded_with_its_weights(hub: FakeHub) -> None:
    hub.add("adapter_config.json", "adapter_model.safetensors", "README.md", "optimizer.pt")
    find_adapter_folder("owner/name")
    assert hub.fetched == {"adapter_config.json", "adapter_model.safetensors"}


def test_adapter_on_the_hub_is_refused_as_a_model(hub: FakeHub) -> None:
    hub.add("adapter_config.json", "adapter_model.safetensors", "README.md")
    with pytest.raises(NoSuchModel, match="is a LoRA adapter; give its base model"):
        check_config(find_model_folder("owner/name"))
    assert hub.fetched == {"adapter_config.json"}


def test_gguf_file_in_the_cache_of_the_hub_is_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    snapshot, blob = tmp_path / "models--owner--name" / "snapshots" / "c0ffee", tmp_path / "5f1d3e"
    snapshot.mkdir(parents=True)
    shutil.copy(GGUF / "qwen3.gguf", blob)
    (snapshot / "q3-Q8_0.gguf").symlink_to(blob)
    folder = find_model_folder(str(snapshot))
    assert weight_files(folder) == (folder / "q3-Q8_0.gguf",)
    check_complete(folder)
