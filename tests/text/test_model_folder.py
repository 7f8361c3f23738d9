"""Folders of models that are named by file, by folder or by Hugging Face id."""

import shutil
from pathlib import Path

import pytest

from baton.text.model_folder import NoSuchModel, choose_gguf, find_model_folder
from baton.text.weight_files import WeightsRefused, weight_files

FILES = Path(__file__).parents[1] / "fixtures" / "gguf"
HUB = ["README.md", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-m-f16.gguf", "m-BF16-00001-of-00002.gguf"]
HUB += ["m-BF16-00002-of-00002.gguf"]


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
    ],
)
def test_file_of_a_hub_id_is_chosen_by_name_or_type(chosen: str, files: tuple[str, ...]) -> None:
    assert choose_gguf(HUB, chosen) == files


@pytest.mark.parametrize(
    ("files", "chosen", "message"),
    [
        (HUB, "Q2_K", r"no file 'Q2_K'; add one of these after a colon: m-BF16\.gguf, m-Q4_K_M\.gguf, m-Q8_0\.gguf"),
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
