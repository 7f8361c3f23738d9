"""Bounded reading of files that others wrote. Any failure becomes an error that names the file."""

import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

MAX_JSON_BYTES = 64 << 20  # for comparison: an index of 140 000 tensors has 16 MB
MAX_TOKENIZER_BYTES = 256 << 20
MAX_DEPTH = 64  # maximum depth of nested lists and objects
MESSAGE_CHARACTERS = 1000
LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # beginning of the file that Git LFS leaves for another one
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class FileRefused(Exception):
    """Error: a file is unusable. The message names the file; it is one printable line of limited length."""

    def __init__(self, message: str) -> None:
        line = "".join(each if each.isprintable() else _spelled(each) for each in message[: MESSAGE_CHARACTERS + 1])
        super().__init__(line if len(line) <= MESSAGE_CHARACTERS else f"{line[: MESSAGE_CHARACTERS - 3]}...")


class NotJson(FileRefused):
    """Error: a file is empty, or contains no JSON in UTF-8 without a byte order mark."""


def _spelled(unprintable: str) -> str:
    return " " if unprintable.isspace() else unprintable.encode("unicode_escape").decode()


@contextmanager
def reading(path: Path, refusal: type[FileRefused]) -> Iterator[None]:
    """Convert any exception from reading `path` to a `refusal`, which names `path` or a file that it refers to."""
    try:
        yield
    except FileRefused as error:
        own = isinstance(error, refusal)
        if str(path.parent if path.suffix else path) in str(error) or (path.suffix and path.name in str(error)):
            if own:
                raise
            raise refusal(str(error)) from error
        raise (type(error) if own else refusal)(f"{path}: {error}") from error
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # panic of a Rust library
            raise
        raise refusal(f"{path}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    match error:
        case RecursionError():
            return "nested too deeply"
        case MemoryError():
            return "takes more memory than there is"
        case OSError():
            return error.strerror or str(error)
        case KeyError():
            return f"lacks {error}"
        case _:
            return f"{type(error).__name__}: {error}"


def reads(
    refusal: type[FileRefused], name: str = ""
) -> Callable[[Callable[Concatenate[Path, Parameters], Result]], Callable[Concatenate[Path, Parameters], Result]]:
    """Return a decorator that applies `reading` to a function of a folder. `name`: file to show in errors."""

    def decorated(function: Callable[Concatenate[Path, Parameters], Result]) -> Any:
        @wraps(function)
        def checked(folder: Path, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            with reading(folder / name, refusal):
                _check_entries(folder)
                return function(folder, *args, **kwargs)

        return checked

    return decorated


def _check_entries(folder: Path) -> None:
    """Reject pipes, sockets and devices: libraries open them by name and would block. Raises: FileRefused."""
    if folder.is_dir():
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.is_dir() and Path(entry.path).exists():
                    check_file(Path(entry.path))


def check_file(path: Path, most_bytes: int | None = None) -> int:
    """Return the size of a regular file. Raises: FileRefused for other files, and for too large ones; OSError."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise FileRefused(f"{path}: not a regular file")
    if most_bytes is not None and found.st_size > most_bytes:
        raise FileRefused(f"{path}: has {found.st_size} bytes; at most {most_bytes} are read")
    return found.st_size


def read_file(path: Path, most_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Return the content of a regular file. Raises: FileRefused, OSError."""
    check_file(path, most_bytes)
    check_fetched(path)
    return path.read_bytes()


def check_fetched(path: Path) -> None:
    """Reject a file of a clone without the content of large files. Raises: FileRefused, OSError."""
    with path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise FileRefused(f"{path}: a pointer of Git LFS instead of the file; fetch it with git lfs pull")


def read_json(path: Path, refusal: type[FileRefused], kind: type[Result]) -> Result:
    """Return the JSON content of a file. `kind`: its type, dict or list. Raises: `refusal`."""
    with reading(path, refusal):
        loaded = parse_json(path, read_file(path))
        if not isinstance(loaded, kind):
            raise FileRefused(f"{path}: not a JSON {'object' if kind is dict else 'array'}")
        _check_depth(path, loaded)
        return loaded


def parse_json(path: Path, content: bytes) -> Any:
    """Return the JSON that a file contains. Raises: NotJson."""
    if not content.strip():
        raise NotJson(f"{path}: is empty")
    try:
        return json.loads(content.decode())  # bytes would also be read in UTF-16, which transformers rejects
    except ValueError as error:
        raise NotJson(f"{path}: not valid JSON: {error}") from error


def _check_depth(path: Path, loaded: Any) -> None:
    level = [loaded]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise FileRefused(f"{path}: nested deeper than {MAX_DEPTH} levels")
