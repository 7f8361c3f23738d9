"""Which native kernels are built, by compilers that know less than the processor too, and which library is loaded."""

from pathlib import Path

import pytest

from baton.kernels.native import build as building
from baton.kernels.native.build import LEVELS, NoCompiler, best_library, build, library_path, main

COMPILER = """#!/bin/bash
# Writes what -o names, and knows no flag that begins with one of {unknown}.
for argument in "$@"; do
  for flag in {unknown}; do
    [[ $argument == $flag* ]] && {{ echo "unrecognized command-line option '$argument'" >&2; exit 1; }}
  done
  [ "$before" = -o ] && touch "$argument"
  before=$argument
done
exit 0
"""


@pytest.fixture
def built(tmp_path: Path) -> Path:
    return tmp_path / "built"


def use_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, unknown: str) -> None:
    compiler = folder / "compiler"
    compiler.write_text(COMPILER.format(unknown=unknown))
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(building, "processor_level", lambda: "AMX_BF16")


def levels_in(folder: Path) -> list[str]:
    return [level for level in LEVELS if library_path(level, folder).exists()]


@pytest.mark.parametrize(
    ("unknown", "level"),
    [
        ("-mnothing", "AMX_BF16"),
        ("-mamx-", "AVX512_BF16"),
        ("-mamx- -mavx512bf16", "AVX512_VNNI"),
        ("-march=skylake-avx512", "AVX2"),
    ],
)
def test_a_compiler_that_does_not_know_the_processor_builds_the_next_level_below(
    unknown: str,
    level: str,
    tmp_path: Path,
    built: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    use_compiler(tmp_path, monkeypatch, unknown)
    assert main([], built) == 0
    assert levels_in(built) == [level]
    assert best_library("AMX_BF16", built) == library_path(level, built)
    assert best_library("DEFAULT", built) is None
    assert ("does not know all instructions of AMX_BF16" in capsys.readouterr().err) == (level != "AMX_BF16")


def test_all_levels_that_the_compiler_knows_are_built(
    tmp_path: Path, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_compiler(tmp_path, monkeypatch, "-mamx-")
    assert main(["--all"], built) == 0
    assert levels_in(built) == list(LEVELS)[1:]
    assert best_library("AVX2", built) == library_path("AVX2", built)


def test_without_a_compiler_nothing_is_built_and_that_is_said(
    tmp_path: Path, built: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(NoCompiler, match=r"no C\+\+ compiler"):
        build("DEFAULT", built)
    assert main([], built) == 0
    assert "native kernels not built" in capsys.readouterr().err
    assert not built.exists()


def test_a_library_of_other_sources_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = library_path("DEFAULT", tmp_path)
    monkeypatch.setattr("baton.kernels.native.build.FLAGS", ("-O1",))
    assert library_path("DEFAULT", tmp_path) != before
