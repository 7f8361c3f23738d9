"""One version in all places, and how the next one begins."""

import datetime
import shutil
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import baton
from baton.versions import RELEASE
from tests.fixtures.tools import ROOT, load_script

TODAY = datetime.date(2031, 2, 3)


@pytest.fixture(scope="module")
def release() -> ModuleType:
    return load_script(ROOT / "deploy" / "release.py")


@pytest.fixture
def copy(release: ModuleType, tmp_path: Path) -> Path:
    """Of the files that have the version."""
    for name in (*release.PLACES, "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    return tmp_path


def versions(release: ModuleType, root: Path) -> set[str]:
    """As every place has it."""
    found = set[str]()
    for folder in (root, root / "deploy" / "packaging" / "client", root / "deploy" / "packaging" / "lab"):
        found.add(tomllib.loads((folder / "pyproject.toml").read_text())["project"]["version"])
    [needed] = [line for line in _dependencies(root) if line.startswith("baton-client")]
    found.add(needed.removeprefix("baton-client=="))
    for name, prefix in (("Dockerfile", "ARG VERSION="), ("src/baton/versions.py", "RELEASE = ")):
        lines = (root / name).read_text().splitlines()
        found |= {line.removeprefix(prefix).strip('"') for line in lines if line.startswith(prefix)}
    return found


def _dependencies(root: Path) -> list[str]:
    lines: list[str] = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    return lines


def test_version_is_equal_in_every_place(release: ModuleType) -> None:
    assert versions(release, ROOT) == {RELEASE} == {baton.__version__}


def test_release_begin_updates_every_place(release: ModuleType, copy: Path) -> None:
    release.begin(copy, "9.0.0", "c" * 40, TODAY)
    assert versions(release, copy) == {"9.0.0"}
    named = tomllib.loads((copy / "pyproject.toml").read_text())["tool"]["baton"]["last-release"]
    assert named == {"version": RELEASE, "commit": "c" * 40}
    assert f"## [Unreleased]\n\n## [{RELEASE}] - 2031-02-03\n" in (copy / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("following", ["0.0.1", RELEASE, "1.0", "9.0.0rc1"])
def test_release_begin_with_older_version_writes_nothing(release: ModuleType, copy: Path, following: str) -> None:
    with pytest.raises(ValueError, match=f"'{following}' is no version after {RELEASE}"):
        release.begin(copy, following, "c" * 40, TODAY)
    assert versions(release, copy) == {RELEASE}


def test_release_begin_without_unreleased_heading_is_refused(release: ModuleType, copy: Path) -> None:
    (copy / "CHANGELOG.md").write_text("# Changelog\n\n## [1.2.3] - 2031-02-03\n")
    with pytest.raises(ValueError, match=r"CHANGELOG\.md has no heading"):
        release.begin(copy, "9.0.0", "c" * 40, TODAY)


def test_release_begin_with_missing_version_writes_nothing(release: ModuleType, copy: Path) -> None:
    (copy / "Dockerfile").write_text("ARG VERSION=0.0.1\n")
    with pytest.raises(ValueError, match="Dockerfile: 'ARG VERSION="):
        release.begin(copy, "9.0.0", "c" * 40, TODAY)
    assert f'"{RELEASE}"' in (copy / "pyproject.toml").read_text()
