"""Folders of models that are named by file, by folder or by Hugging Face id."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import scan_cache_dir

from baton.launch.tiny_checkpoint import write_tiny_checkpoint
from baton.text.gguf.header import GgufRefused
from baton.text.model_folder import NoSuchModel, choose_gguf, find_model_folder, name_of_model
from baton.text.weight_files import WeightsRefused, weight_files

FILES = Path(__file__).parents[1] / "fixtures" / "gguf"
HUB = ["README.md", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-m-f16.gguf", "m-BF16-00001-of-00002.gguf"]
HUB += ["m-BF16-00002-of-00002.gguf", "m-Q5_0.GGUF"]
DIGEST, COMMIT = "0" * 64, "5" * 40


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("chosen", "files"),
    [
        ("", ("m-Q4_K_M.gguf",)),
        ("q8_0", ("m-Q8_0.gguf",)),
        ("m-Q8_0.gguf", ("m-Q8_0.gguf",)),
        ("BF16", ("m-BF16-00001-of-00002.gguf", "m-BF16-00002-of-00002.gguf")),
        ("q5_0", ("m-Q5_0.GGUF",)),
    ],
)
def test_file_of_a_hub_id_is_chosen_by_name_or_type(chosen: str, files: tuple[str, ...]) -> None:
    assert choose_gguf(HUB, chosen) == files


@pytest.mark.parametrize(
    ("files", "chosen", "message"),
    [
        (HUB, "Q2_K", r"no file 'Q2_K'; add one of these after a colon: m-BF16\.gguf, m-Q4_K_M\.gguf, m-Q5_0\.GGUF,"),
        (["a-Q2_K.gguf", "b-Q3_K.gguf"], "", r"several models; add one of these after a colon: a-Q2_K\.gguf, b-Q3_K"),
        (["README.md", "mmproj-x.gguf"], "", r"neither config\.json nor a GGUF file"),
    ],
)
def test_hub_id_without_that_file_lists_what_there_is(files: list[str], chosen: str, message: str) -> None:
    with pytest.raises(NoSuchModel, match=message):
        choose_gguf(files, chosen)


def test_hub_id_of_gguf_files_downloads_only_the_chosen_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[list[str]] = []

    def download(hub_id: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        shutil.copy(FILES / "llama.gguf", tmp_path / "m-Q8_0.gguf")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda self, hub_id: HUB)
    folder = find_model_folder("owner/name:Q8_0")
    assert asked == [["m-Q8_0.gguf"]]
    assert (folder / "config.json").is_file() and (folder / "m-Q8_0.gguf").is_file()


def test_folder_with_one_gguf_file_is_that_model(tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.mkdir()
    shutil.copy(FILES / "qwen3.gguf", given)
    assert find_model_folder(str(given)) == find_model_folder(str(given / "qwen3.gguf"))


def test_gguf_file_next_to_a_config_without_tokenizer_is_read_alone(tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.mkdir()
    shutil.copy(FILES / "qwen3.gguf", given)
    (given / "config.json").write_text('{"model_type": "qwen3"}')
    assert find_model_folder(str(given)) == find_model_folder(str(given / "qwen3.gguf"))


def test_projector_of_images_next_to_a_gguf_file_is_no_model(tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.mkdir()
    shutil.copy(FILES / "qwen3.gguf", given)
    (given / "mmproj-qwen3-f16.gguf").touch()
    (given / "imatrix.gguf").touch()
    assert find_model_folder(str(given)) == find_model_folder(str(given / "qwen3.gguf"))


def test_gguf_file_named_after_its_importance_matrix_is_a_model(tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.mkdir()
    shutil.copy(FILES / "qwen3.gguf", given / "qwen3-imatrix-Q4_K_M.gguf")
    folder = find_model_folder(str(given))
    assert weight_files(folder) == (folder / "qwen3-imatrix-Q4_K_M.gguf",)


def test_folder_with_several_gguf_models_names_them(tmp_path: Path) -> None:
    for name in ("llama.gguf", "qwen3.gguf"):
        shutil.copy(FILES / name, tmp_path)
    with pytest.raises(
        WeightsRefused, match=r"has several models \(llama\.gguf, qwen3\.gguf\); give one of these files"
    ):
        find_model_folder(str(tmp_path))


def assert_is_qwen3(folder: Path) -> None:
    """Check that a folder has the configuration and the weights of the file qwen3.gguf."""
    plain = find_model_folder(str(FILES / "qwen3.gguf"))
    assert (folder / "config.json").read_bytes() == (plain / "config.json").read_bytes()
    assert (folder / "tokenizer.json").read_bytes() == (plain / "tokenizer.json").read_bytes()
    [weights] = weight_files(folder)
    assert weights.suffix == ".gguf" and weights.read_bytes() == (FILES / "qwen3.gguf").read_bytes()


@pytest.mark.parametrize("given", ["", "m.Q8_0.GGUF"])
def test_gguf_file_with_its_suffix_in_capitals_is_that_model(given: str, tmp_path: Path) -> None:
    folder = tmp_path / "given"
    folder.mkdir()
    shutil.copy(FILES / "qwen3.gguf", folder / "m.Q8_0.GGUF")
    assert_is_qwen3(find_model_folder(str(folder / given)))
    assert name_of_model(str(folder / "m.Q8_0.GGUF")) == "m.Q8_0"


def test_missing_part_with_its_suffix_in_capitals_is_named(tmp_path: Path) -> None:
    part = Path(shutil.copy(FILES / "qwen3.gguf", tmp_path / "m-00001-of-00002.GGUF"))
    with pytest.raises(GgufRefused, match=r"a part of a split model, of which m-00002-of-00002\.GGUF is missing"):
        find_model_folder(str(part))


@pytest.mark.parametrize("name", [f"sha256-{DIGEST}", "m.Q8_0", "m.bin"])
def test_gguf_file_without_its_suffix_is_recognised_by_its_content(name: str, tmp_path: Path) -> None:
    file = Path(shutil.copy(FILES / "qwen3.gguf", tmp_path / name))
    assert_is_qwen3(find_model_folder(str(file)))
    assert name_of_model(str(file)) == name


def write_manifest(models: Path, layers: dict[str, str]) -> Path:
    """Write a manifest as Ollama does. `layers`: digest by the last part of the media type."""
    kinds = [{"mediaType": f"application/vnd.ollama.image.{kind}", "digest": each} for kind, each in layers.items()]
    manifest = models / "manifests" / "registry.ollama.ai" / "library" / "qwen3" / "0.6b"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "config": {"digest": f"sha256:{DIGEST}"}, "layers": kinds}))
    return manifest


def test_manifest_of_ollama_is_the_model_of_its_blob(tmp_path: Path) -> None:
    content = (FILES / "qwen3.gguf").read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    manifest = write_manifest(tmp_path, {"license": f"sha256:{DIGEST}", "model": f"sha256:{digest}"})
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / f"sha256-{digest}").write_bytes(content)
    assert_is_qwen3(find_model_folder(str(manifest)))
    assert name_of_model(str(manifest)) == "qwen3:0.6b"


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"model": f"sha256:{DIGEST}"}, f"sha256-{DIGEST}: No such file"),
        ({"model": "sha256:../../secret"}, "has the digest 'sha256:../../secret', which names no file"),
        ({"model": f"sha256:{DIGEST}", "adapter": f"sha256:{DIGEST}"}, "0.6b: has an adapter, which is not read; give"),
        ({"tensor": f"sha256:{DIGEST}"}, "0.6b: lacks 'application/vnd.ollama.image.model'"),
    ],
)
def test_manifest_without_a_model_of_its_own_is_refused_by_name(
    layers: dict[str, str], message: str, tmp_path: Path
) -> None:
    with pytest.raises((NoSuchModel, GgufRefused), match=message):
        find_model_folder(str(write_manifest(tmp_path, layers)))


def write_hub_cache(cache: Path, files: Path, commit: str = COMMIT) -> Path:
    """Write a repository's folder as huggingface_hub does: links to blobs in a folder per commit."""
    repository = cache / "models--owner--name"
    for name in ("blobs", f"snapshots/{commit}", "refs"):
        (repository / name).mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    for index, file in enumerate(sorted(files.iterdir())):
        shutil.copy(file, repository / "blobs" / f"{index:040x}")
        (repository / "snapshots" / commit / file.name).symlink_to(Path("../../blobs") / f"{index:040x}")
    return repository


def known_to_the_hub(cache: Path) -> Any:
    [known] = scan_cache_dir(cache).repos
    return known


@pytest.mark.parametrize("given", ["", f"snapshots/{COMMIT}"])
def test_folder_in_the_cache_of_the_hub_is_that_model(given: str, tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "plain")
    repository = write_hub_cache(tmp_path / "hub", tmp_path / "plain")
    assert known_to_the_hub(tmp_path / "hub").refs["main"].commit_hash == COMMIT
    folder = find_model_folder(str(repository / given))
    assert folder == repository / "snapshots" / COMMIT
    assert weight_files(folder) == (folder / "model.safetensors",)
    assert name_of_model(str(repository / given)) == known_to_the_hub(tmp_path / "hub").repo_id == "owner/name"


def test_link_to_a_folder_in_the_cache_of_the_hub_is_that_model(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "plain")
    repository = write_hub_cache(tmp_path / "hub", tmp_path / "plain")
    (tmp_path / "link").symlink_to(repository)
    assert find_model_folder(str(tmp_path / "link")) == repository / "snapshots" / COMMIT


@pytest.mark.parametrize("given", ["", f"snapshots/{COMMIT}", f"snapshots/{COMMIT}/m.gguf", f"blobs/{0:040x}"])
def test_gguf_file_in_the_cache_of_the_hub_is_that_model(given: str, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    shutil.copy(FILES / "qwen3.gguf", tmp_path / "plain" / "m.gguf")
    repository = write_hub_cache(tmp_path / "hub", tmp_path / "plain")
    assert_is_qwen3(find_model_folder(str(repository / given)))


def test_missing_snapshot_in_the_cache_of_the_hub_is_named(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "plain")
    repository = write_hub_cache(tmp_path / "hub", tmp_path / "plain")
    (repository / "refs" / "main").write_text("6" * 40)
    with pytest.raises(NoSuchModel, match=r"refs/main: names a snapshot that is not in .*; fetch the model again"):
        find_model_folder(str(repository))
