"""Builds the native kernels: `.venv/bin/python -m kernels.native.build [--all]`. Takes seconds; needs a C++17 compiler.

One library per level of the instruction set, from the same sources; this processor's unless all are wanted. Its name
holds a digest of them, so that one built from other sources is never loaded.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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
"""Flags by what processor_level() says. The last one runs on any processor."""
EMULATED_BF16 = "AVX512_BF16_EMULATED"
EMULATED_AMX = "AMX_BF16_EMULATED"
EMULATIONS = {
    EMULATED_BF16: (*AVX512_VNNI, "-DBATON_EMULATED_BF16"),
    EMULATED_AMX: (*AVX512_VNNI, "-DBATON_EMULATED_BF16", "-DBATON_EMULATED_AMX"),
}
"""For tests, on processors with AVX-512 and without its bfloat16 products or without AMX: those levels' sources."""
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Wno-psabi", "-Wno-maybe-uninitialized")
COMPILE_TIMEOUT_S = 300


class NoCompiler(Exception):
    """There is no C++ compiler on this machine."""


def sources() -> list[Path]:
    return sorted(FOLDER.glob("*.cpp"))


def library_path(level: str, folder: Path = BUILT) -> Path:
    """Where the library of this level is once it has been built from the sources as they are now."""
    digest = hashlib.sha256(repr((FLAGS, _flags(level))).encode())
    for path in sorted(FOLDER.glob("*.cpp")) + sorted(FOLDER.glob("*.h")):
        digest.update(path.read_bytes())
    return folder / f"kernels-{level.lower()}-{digest.hexdigest()[:16]}.so"


def build(level: str, folder: Path = BUILT, extra: tuple[str, ...] = ()) -> Path:
    """Builds one level unless it is there; `extra` goes to compiler and linker.

    Raises: NoCompiler, CalledProcessError.
    """
    target = library_path(level, folder)
    if target.exists():
        return target
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        raise NoCompiler("no C++ compiler (c++, g++, clang++) on PATH")
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        objects = {source: f"{scratch}/{source.stem}.o" for source in sources()}
        compile_one = [compiler, *FLAGS, *_flags(level), *extra, "-c"]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda source: _run([*compile_one, str(source), "-o", objects[source]]), objects))
        made = f"{scratch}/made.so"
        _run([compiler, "-shared", *extra, *objects.values(), "-o", made, "-pthread"])
        for stale in folder.glob(f"kernels-{level.lower()}-*.so"):
            stale.unlink()
        Path(made).replace(target)  # whole or not at all, also beside another build
    return target


def _flags(level: str) -> tuple[str, ...]:
    return EMULATIONS[level] if level in EMULATIONS else LEVELS[level]


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, timeout=COMPILE_TIMEOUT_S)


def processor_level() -> str:
    """The best of LEVELS that this processor runs. ATEN_CPU_CAPABILITY, which torch reads, may ask for less."""
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    if capability == "AVX512" and torch.cpu._is_vnni_supported():
        if not torch.cpu._is_avx512_bf16_supported():
            return "AVX512_VNNI"
        return "AMX_BF16" if torch.cpu._is_amx_tile_supported() else "AVX512_BF16"
    return "AVX2" if capability in ("AVX512", "AVX2") else "DEFAULT"


def main(arguments: Sequence[str]) -> int:
    """Builds this processor's level, or every one; 0 also without a compiler, since all of it runs without, slower."""
    try:
        for level in LEVELS if "--all" in arguments else [processor_level()]:
            sys.stdout.write(f"{build(level)}\n")
    except NoCompiler as error:
        sys.stderr.write(f"native kernels not built, PyTorch's are used instead: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
