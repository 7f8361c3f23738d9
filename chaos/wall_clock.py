"""A wall clock that jumps, for processes started with it. Built from clock.c where there is a compiler."""

import mmap
import shutil
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path

PAGE = struct.Struct("<qq")  # seconds off, how often somebody was told so
BUILD_S = 30.0


class WallClock:
    """Owns the page that the preloaded library reads."""

    def __init__(self, library: Path, page: Path) -> None:
        page.write_bytes(bytes(PAGE.size))
        with page.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), PAGE.size)
        self.environment: Mapping[str, str] = {"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(page)}

    def jump(self, seconds: int) -> None:
        """The wall clock is now off by so much, in all of the processes; 0 is right again."""
        self._page[:8] = struct.pack("<q", seconds)

    @property
    def told(self) -> int:
        """How often a process asked while the clock was off."""
        return int(PAGE.unpack(self._page[: PAGE.size])[1])

    def close(self) -> None:
        self._page.close()


def find_compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def make_wall_clock(folder: Path) -> WallClock | None:
    """None where there is no C compiler: then clocks do not jump in this run."""
    compiler = find_compiler()
    if compiler is None:
        return None
    library = folder / "clock.so"
    source = Path(__file__).with_name("clock.c")
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    done = subprocess.run(command, capture_output=True, timeout=BUILD_S, check=False)
    return WallClock(library, folder / "clock.page") if done.returncode == 0 else None
