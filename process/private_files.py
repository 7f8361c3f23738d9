"""Files and folders that only their user may read: logs, traces and records contain request ids and addresses."""

import fcntl
import os
from contextlib import suppress
from pathlib import Path

FILE_MODE, FOLDER_MODE = 0o600, 0o700


def private_folder(folder: Path) -> Path:
    """Create `folder`, or remove other users' access to an existing one. Raises: OSError."""
    folder.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
    folder.chmod(FOLDER_MODE)
    return folder


def append_private(path: Path, content: bytes, max_bytes: int | None = None) -> None:
    """Append in one write to a file that only its user may read. Rename it to `older(path)` if it has `max_bytes`.

    Several processes may append to one file. Raises: OSError.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    with os.fdopen(descriptor, "ab", buffering=0) as file:
        file.write(content)
        if max_bytes is not None and file.tell() >= max_bytes:
            fcntl.flock(file, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if path.stat().st_ino == os.fstat(file.fileno()).st_ino:  # no other process renamed it
                    path.replace(older(path))


def older(path: Path) -> Path:
    """Return the path to which `append_private` renames a full `path`. This file has the earlier content."""
    return path.with_name(f"{path.name}.1")


def write_private(path: Path, text: str) -> None:
    """Write `text` to a file that only its user may read, replacing an old file atomically. Raises: OSError."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    append_private(draft, text.encode())
    draft.replace(path)
