"""The output of a run's processes, kept in files beside the terminal: a file for each process, bounded in size."""

import contextlib
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from baton.process.private_files import append_private, private_folder

MOST_BYTES = 4 << 20
"""Maximum size of a file; then it becomes the older one of two."""
KEPT_RUNS = 5
PATTERN = "logs-*"


class LineSink(Protocol):
    def write(self, line: str) -> None: ...


class LogFile:
    """Appends lines. A disk that is full, or a folder that is gone, ends the file and nothing else."""

    def __init__(self, path: Path, report: Callable[[str], None], most_bytes: int = MOST_BYTES) -> None:
        """Open the file. `report` is called once, if the file can no longer be written."""
        self._path = path
        self._report = report
        self._most_bytes = most_bytes
        self._is_open = True

    def write(self, line: str) -> None:
        if not self._is_open:
            return
        try:
            # Opened for each line: there are few, and a file may be moved or removed by others.
            append_private(self._path, line.encode(errors="replace") + b"\n", self._most_bytes)
        except OSError as error:
            self._is_open = False
            self._report(f"no more lines in {self._path}: {error.strerror}")


class TeeWriter:
    """Writes each line to several."""

    def __init__(self, *sinks: LineSink) -> None:
        self._sinks = sinks

    def write(self, line: str) -> None:
        for sink in self._sinks:
            sink.write(line)


def begin_logs(runtime: Path, port: int) -> Path:
    """The folder of a run. Lines of earlier runs on that port stay; folders of all but the newest few runs are removed.

    Raises: OSError.
    """
    folder = private_folder(private_folder(runtime) / f"logs-{port}")
    folder.touch()
    for old in newest_first(runtime.glob(PATTERN))[KEPT_RUNS:]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def newest_first(paths: Iterable[Path]) -> list[Path]:
    """Return paths by the time of the last change, newest first; those that vanish meanwhile are left out."""
    changed_ns: dict[Path, int] = {}
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            changed_ns[path] = path.stat().st_mtime_ns
    return sorted(changed_ns, key=lambda path: changed_ns[path], reverse=True)
