"""Build the native kernels: `.venv/bin/python -m baton.kernels.native.build [--all]`. Needs a C++17 compiler.

There is one library per instruction-set level, all from the same sources; by default only this processor's is built.
A library's name contains a digest of the sources, so that one that was built from other sources is never loaded.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
BUILT = FOLDER / "built"
AVX512 = ("-march=skylake-avx512", "-mprefer-vector-width=512")
AVX512_VNNI = (*AVX512, "-mavx512vnni")
AVX512_BF16 = (*AVX512_VNNI, "-mavx512bf16")
LEVELS = {
    "AMX_BF16": (*AVX512_BF16, "-mamx-tile", "-mamx-bf16"),
    "AVX512_BF16": AVX512_BF16,
    "AVX512_VNNI": AVX512_VNNI,
    "AVX2": ("-march=haswell",),
    "DEFAULT": (),
}
"""Compiler flags of each instruction-set level, highest level first. The last level runs on any processor."""
EMULATED_AMX = "AMX_BF16_EMULATED"
EMULATIONS = {EMULATED_AMX: (*AVX512_VNNI, "-DBATON_EMULATED_BF16", "-DBATON_EMULATED_AMX")}
"""Compiler flags of levels for tests, which emulate AMX on processors that have only AVX-512."""
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Wno-psabi", "-Wno-maybe-uninitialized")
COMPILE_TIMEOUT_S = 900


class NoCompiler(Exception):
    """Error: no C++ compiler was found, or it cannot compile the kernels."""


def pieces() -> dict[str, list[Path]]:
    """Return groups of source files by name. Each group is compiled as one file; all groups take about equally long."""
    sources = sorted(FOLDER.glob("*.cpp"))
    attention = [source for source in sources if source.stem.startswith("paged_")]
    return {"attention": attention, "others": [source for source in sources if source not in attention]}


def library_path(level: str, folder: Path = BUILT) -> Path:
    """Return the path of a level's library for the current sources, whether or not it is built already."""
    digest = hashlib.sha256(repr((FLAGS, _flags(level))).encode())
    for path in sorted(FOLDER.glob("*.cpp")) + sorted(FOLDER.glob("*.h")):
        digest.update(path.read_bytes())
    return folder / f"kernels-{level.lower()}-{digest.hexdigest()[:16]}.so"


def build(level: str, folder: Path = BUILT, extra: tuple[str, ...] = ()) -> Path:
    """Build the library of one level unless it exists. `extra`: additional flags for compiler and linker.

    Raises: NoCompiler, CalledProcessError.
    """
    target = library_path(level, folder)
    if target.exists():
        return target
    compiler = find_compiler()
    folder.mkdir(exist_ok=True)
    with _alone_in(folder), tempfile.TemporaryDirectory(dir=folder) as scratch:
        if target.exists():  # another process has built it while this one waited
            return target
        commands, objects = [], []
        for name, sources in pieces().items():
            piece = Path(scratch) / f"{name}.cpp"
            piece.write_text("".join(f'#include "{source}"\n' for source in sources))
            objects.append(f"{scratch}/{name}.o")
            commands.append([compiler, *FLAGS, *_flags(level), *extra, "-c", str(piece), "-o", objects[-1]])
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        made = f"{scratch}/made.so"
        _run([compiler, "-shared", *extra, *objects, "-o", made, "-pthread"])
        for stale in folder.glob(f"kernels-{level.lower()}-*.so"):
            stale.unlink()
        Path(made).replace(target)  # atomic, so that no process loads an incomplete library
    return target


def find_compiler() -> str:
    """Return the command of the C++ compiler. Raises: NoCompiler."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        raise NoCompiler("no C++ compiler (c++, g++, clang++) on PATH; install one or set CXX")
    return compiler


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def best_library(level: str, folder: Path = BUILT) -> Path | None:
    """Return the library of the highest level, at most `level`, that is built; None if none is built."""
    paths = (library_path(each, folder) for each in _from(level))
    return next((path for path in paths if path.exists()), None)


def build_best(level: str, folder: Path = BUILT) -> Path:
    """Build the library of the highest level, at most `level`, that the compiler supports.

    Raises: NoCompiler, CalledProcessError.
    """
    for each in _from(level):
        if knows(find_compiler(), each):
            return build(each, folder)
        sys.stderr.write(f"the compiler does not know all instructions of {each}\n")
    raise NoCompiler(f"{find_compiler()} accepts the compiler flags of none of the levels {', '.join(_from(level))}")


def knows(compiler: str, level: str) -> bool:
    """Return whether the compiler accepts the level's flags. For example, flags of AMX need GCC 11 or Clang 12."""
    command = [compiler, *_flags(level), "-fsyntax-only", "-x", "c++", os.devnull]
    return subprocess.run(command, capture_output=True, timeout=COMPILE_TIMEOUT_S, check=False).returncode == 0


def _from(level: str) -> list[str]:
    levels = list(LEVELS)
    return levels[levels.index(level) :]


def _flags(level: str) -> tuple[str, ...]:
    return EMULATIONS[level] if level in EMULATIONS else LEVELS[level]


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, timeout=COMPILE_TIMEOUT_S)


def processor_level() -> str:
    """Return the highest of LEVELS that this processor supports. The variable ATEN_CPU_CAPABILITY may lower it."""
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    if capability == "AVX512" and torch.cpu._is_vnni_supported():
        if not torch.cpu._is_avx512_bf16_supported():
            return "AVX512_VNNI"
        return "AMX_BF16" if torch.cpu._is_amx_tile_supported() else "AVX512_BF16"
    return "AVX2" if capability in ("AVX512", "AVX2") else "DEFAULT"


def main(arguments: Sequence[str], folder: Path = BUILT) -> int:
    """Build the library for this processor's level; with `--all`, those for all levels that the compiler supports.

    Returns 0 even without a compiler, since Baton also runs without native kernels, only slower.
    """
    try:
        wanted = list(LEVELS) if "--all" in arguments else [processor_level()]
        for path in dict.fromkeys(build_best(level, folder) for level in wanted):
            sys.stdout.write(f"{path}\n")
    except NoCompiler as error:
        sys.stderr.write(f"native kernels not built, PyTorch's are used instead: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
