"""Log files of a run: the output of each process, bounded in size."""

import contextlib
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from baton.process.private_files import append_private, private_folder

MAX_BYTES = 4 << 20
"""Maximum size of a log file; a full one is renamed, and replaces the older file of the process."""
KEPT_RUNS = 5
PATTERN = "logs-*"


class LineSink(Protocol):
    def write(self, line: str) -> None: ...


class LogFile:
    """Log file of one process. Writing stops at the first error, such as a full disk."""

    def __init__(self, path: Path, report: Callable[[str], None], max_bytes: int = MAX_BYTES) -> None:
        """Prepare a log file, which the first line creates. `report` gets a message if the file cannot be written."""
        self._path = path
        self._report = report
        self._max_bytes = max_bytes
        self._is_open = True

    def write(self, line: str) -> None:
        if not self._is_open:
            return
        try:
            # The file is opened for each line, since other programs may move or remove it; lines are rare.
            append_private(self._path, line.encode(errors="replace") + b"\n", self._max_bytes)
        except OSError as error:
            self._is_open = False
            self._report(f"cannot write {self._path}: {error.strerror}; this log ends here")


class TeeWriter:
    """Sink that passes each line to several sinks."""

    def __init__(self, *sinks: LineSink) -> None:
        self._sinks = sinks

    def write(self, line: str) -> None:
        for sink in self._sinks:
            sink.write(line)


def begin_logs(runtime: Path, port: int) -> Path:
    """Create the log folder of `port`, or keep the existing one with its logs; remove all but the newest KEPT_RUNS
    folders.

    Raises: OSError.
    """
    folder = private_folder(private_folder(runtime) / f"logs-{port}")
    folder.touch()
    for old in newest_first(runtime.glob(PATTERN))[KEPT_RUNS:]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def newest_first(paths: Iterable[Path]) -> list[Path]:
    """Return paths by modification time, newest first, without files that are being removed."""
    changed_ns: dict[Path, int] = {}
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            changed_ns[path] = path.stat().st_mtime_ns
    return sorted(changed_ns, key=lambda path: changed_ns[path], reverse=True)
