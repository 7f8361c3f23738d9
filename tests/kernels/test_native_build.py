"""Which native kernels are built, by compilers that know less than the processor too, and which library is loaded."""

from ctypes import CDLL
from pathlib import Path

import pytest

from baton.kernels.native import build as building
from baton.kernels.native import structs
from baton.kernels.native.build import LEVELS, NoCompiler, best_library, build, library_path, main, processor_level
from baton.kernels.native.structs import LimitMismatch, check_limits

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
def test_build_falls_back_to_the_next_level_for_old_compilers(
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


def test_build_without_a_compiler_builds_nothing_and_says_so(
    tmp_path: Path, built: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(NoCompiler, match=r"no C\+\+ compiler"):
        build("DEFAULT", built)
    assert main([], built) == 0
    assert "native kernels not built" in capsys.readouterr().err
    assert not built.exists()


def test_library_of_other_sources_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = library_path("DEFAULT", tmp_path)
    monkeypatch.setattr("baton.kernels.native.build.FLAGS", ("-O1",))
    assert library_path("DEFAULT", tmp_path) != before


def test_library_with_another_constant_is_rejected_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    path = best_library(processor_level())
    assert path is not None
    library = CDLL(str(path))
    check_limits(library)
    monkeypatch.setitem(structs.CONSTANTS, "MAX_GROUP", structs.MAX_GROUP + 1)
    with pytest.raises(LimitMismatch, match=r"MAX_GROUP is 145\.0 in .* and 144\.0 in the native library"):
        check_limits(library)


def test_library_with_another_struct_is_rejected_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    path = best_library(processor_level())
    assert path is not None
    monkeypatch.setitem(structs.STRUCTS, "Pages", structs.ScoringStruct)
    with pytest.raises(LimitMismatch, match="sizeof Pages is"):
        check_limits(CDLL(str(path)))
