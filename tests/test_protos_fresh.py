"""The generated code in protos/ is what its generator makes of the protos, and the protos follow buf's STANDARD."""

import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from tests.fixtures.tools import ROOT, load_script

BUF = "@bufbuild/buf@1.75.0"
BUF_FOLDER = ROOT / ".cache" / "buf"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    return load_script(ROOT / "protos" / "generate.py")


@pytest.fixture(scope="module")
def buf() -> Path:
    """The buf program, from npm, kept between runs."""
    program = BUF_FOLDER / "node_modules" / ".bin" / "buf"
    manifest = BUF_FOLDER / "node_modules" / "@bufbuild" / "buf" / "package.json"
    if program.exists() and f'"version": "{BUF.rpartition("@")[2]}"' in manifest.read_text():
        return program
    npm = shutil.which("npm")
    assert npm is not None, "npm is missing: `apt install nodejs npm`, or a Node.js of https://nodejs.org"
    BUF_FOLDER.mkdir(parents=True, exist_ok=True)
    command = [npm, "install", "--prefix", str(BUF_FOLDER), "--no-audit", "--no-fund", "--no-save", BUF]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, f"`npm install {BUF}` failed:\n{result.stderr}"
    return program


def _generated(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted((folder / "protos").glob("*_pb2*.py*"))}


def test_generated_protos_are_fresh(generator: ModuleType, tmp_path: Path) -> None:
    generator.generate(tmp_path)
    expected, present = _generated(tmp_path), _generated(ROOT)
    assert len(expected) == 3 * len(list((ROOT / "protos").glob("*.proto")))
    stale = [name for name in expected | present if expected.get(name) != present.get(name)]
    assert stale == [], "run `.venv/bin/python protos/generate.py`"


def test_protos_follow_the_standard_rules(buf: Path) -> None:
    result = subprocess.run([buf, "lint"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_buf_lint_finds_a_planted_fault(buf: Path, tmp_path: Path) -> None:
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    (tmp_path / "protos").mkdir()
    (tmp_path / "protos" / "bad.proto").write_text('syntax = "proto3";\npackage bad;\nenum Mode { FAST = 0; }\n')
    result = subprocess.run([buf, "lint"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode != 0
    assert '"_UNSPECIFIED"' in result.stdout
