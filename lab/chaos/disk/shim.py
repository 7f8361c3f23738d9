"""Shared memory page that controls the preloaded disk library, and in which the library counts affected calls."""

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path

from baton.lab.chaos.stack import compile_library

_FIELDS = (
    "read_error", "write_error", "read_delay_us", "cuts_writes", "torn_pid",
    "failed_reads", "failed_writes", "slow_reads", "cut_writes", "torn_bytes",
)  # fmt: skip
_NUMBER = struct.Struct("<q")


class DiskShim:
    """Control of a disk that can fail in all processes started with `environment`. Affects only files in `folder`."""

    def __init__(self, library: Path, page: Path, folder: Path) -> None:
        size_bytes = _NUMBER.size * len(_FIELDS)
        page.write_bytes(bytes(size_bytes))
        with page.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), size_bytes)
        self.environment: Mapping[str, str] = {
            "LD_PRELOAD": str(library),
            "CHAOS_DISK": str(page),
            "CHAOS_DISK_FOLDER": str(folder.resolve()),
        }

    def set(self, field: str, value: int) -> None:
        """Set a field of the page. Values of `read_error` and `write_error` are an errno, 0 for none."""
        at = _NUMBER.size * _FIELDS.index(field)
        self._page[at : at + _NUMBER.size] = _NUMBER.pack(value)

    def get(self, field: str) -> int:
        return int(_NUMBER.unpack_from(self._page, _NUMBER.size * _FIELDS.index(field))[0])

    def close(self) -> None:
        self._page.close()


def make_disk_shim(scratch: Path, folder: Path) -> DiskShim | None:
    """Build the disk library and its control page. Returns None if no C compiler is installed."""
    library = scratch / "disk.so"
    if not compile_library(Path(__file__).with_name("disk.c"), library):
        return None
    return DiskShim(library, scratch / "disk.page", folder)
