"""Value that is computed from files, and computed again when they change. Any thread may read it."""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

Made = TypeVar("Made")
Stamp = tuple[int, int, int]

logger = logging.getLogger(__name__)


class ChangingFiles(Generic[Made]):
    """Value computed from files. If changed files are invalid, missing or only partly replaced, the old value stays."""

    def __init__(self, files: Sequence[Path], make: Callable[[], Made], bad: type[Exception], what: str) -> None:
        """Read the files. `make` reads them and raises `bad` or OSError if they are invalid. `what`: name of the files
        in the log.

        Raises: the exceptions of `make`.
        """
        self._files = tuple(files)
        self._make = make
        self._bad = bad
        self._what = what
        self._lock = threading.Lock()
        self._seen = self._stamps()  # before the files are read, so that a change during the read is noticed
        self._made = make()

    def latest(self) -> Made:
        """Return the value. It is the same object as before if the files have not changed."""
        stamps = self._stamps()
        if stamps != self._seen:
            with self._lock:
                if stamps != self._seen:
                    self._seen = stamps
                    return self.renewed()
        return self._made

    def renewed(self) -> Made:
        """Read the files again, even if unchanged, and return the new value; the previous value if they are invalid."""
        try:
            self._made = self._make()
        except (OSError, self._bad) as error:
            logger.error("%s were not reloaded: %s", self._what, error)
        else:
            logger.info("%s were reloaded", self._what)
        return self._made

    def _stamps(self) -> tuple[Stamp | None, ...]:
        """Return stamps that differ if a file was changed or replaced."""
        return tuple(map(_stamp, self._files))


def _stamp(file: Path) -> Stamp | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
