"""The archive: what each part adds to it, why a part is missing, and a README that lists both."""

import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from baton.cli.bundle.redaction import Redactor
from baton.cli.bundle.sources import Sources
from baton.client import BatonClientError
from baton.launch import CommandFailed

README = "README.txt"
MOST_BYTES = 8 << 20
"""Of one file; the rest of it is cut off."""


class Missing(Exception):
    """A part, or a piece of one, is not to be had; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One file of the archive. `content`: a text, or anything that becomes JSON."""

    name: str
    what: str
    content: object


@dataclass(frozen=True, slots=True)
class Part:
    """`collect` yields its files; a Missing in place of one says why that one is not there."""

    what: str
    collect: Callable[[Sources], Iterator[Piece | Missing]]


@dataclass(frozen=True, slots=True)
class Bundle:
    """Files by name, with a line on each; and what is missing, with the reason."""

    files: Mapping[str, bytes]
    described: Mapping[str, str]
    missing: Sequence[str]


def collect(parts: Sequence[Part], sources: Sources, redactor: Redactor) -> Bundle:
    """No part keeps the others from the archive."""
    files: dict[str, bytes] = {}
    described: dict[str, str] = {}
    missing: list[str] = []
    for part in parts:
        try:
            for piece in part.collect(sources):
                if isinstance(piece, Missing):
                    missing.append(f"{part.what}: {piece}")
                    continue
                files[piece.name] = _bytes_of(piece.content, redactor)
                described[piece.name] = piece.what
        except (Missing, CommandFailed, BatonClientError) as error:
            missing.append(f"{part.what}: {error}")
        except OSError as error:
            missing.append(f"{part.what}: {type(error).__name__}, {error.strerror or 'no reason is given'}")
        except Exception as error:  # noqa: BLE001 -- a fault in one part must not cost the others; its text may hold anything
            missing.append(f"{part.what}: {type(error).__name__} in the collecting of it, which is a fault of Baton")
    return Bundle(files, described, [redactor.clean(each) for each in missing])


def _bytes_of(content: object, redactor: Redactor) -> bytes:
    text = content if isinstance(content, str) else json.dumps(content, indent=1, default=str) + "\n"
    whole = redactor.clean(text).encode(errors="replace")
    return whole if len(whole) <= MOST_BYTES else whole[:MOST_BYTES] + b"\n[cut off]\n"


def readme(bundle: Bundle, made: datetime) -> str:
    width = max(map(len, (*bundle.files, README)), default=0)
    rows = [f"  {name:<{width}}  {bundle.described[name]} ({len(bundle.files[name]):,} bytes)" for name in bundle.files]
    missing = [f"  {each}" for each in bundle.missing] or ["  nothing"]
    return "\n".join(
        [
            f"A bug report of Baton, made by `baton bundle` at {made:%Y-%m-%d %H:%M:%S} UTC.",
            "",
            "Contents:",
            f"  {README:<{width}}  this list",
            *rows,
            "",
            "Missing, and why:",
            *missing,
            "",
            "Left out on purpose: prompts and answers, API keys and their hashes, certificates and their keys,",
            "headers, users and passwords in URLs, and every setting, log line and attribute of a trace that is not on",
            "a list of those that are known to be harmless. Request ids, which clients may choose, are in it. The home",
            "folder stands as `~`. Look through it before you send it.",
            "",
        ]
    )


def write_archive(bundle: Bundle, out: Path, made: datetime) -> None:
    """A tar.gz that only its owner may read; there is no half of one. Raises: CommandFailed."""
    folder = out.name.removesuffix(".gz").removesuffix(".tar").removesuffix(".tgz") or "baton-bundle"
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for name, data in ({README: readme(bundle, made).encode()} | dict(bundle.files)).items():
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size, entry.mtime, entry.mode = len(data), int(made.timestamp()), 0o644
            archive.addfile(entry, io.BytesIO(data))
    unfinished = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        unfinished.touch(mode=0o600)
        unfinished.write_bytes(content.getvalue())
        unfinished.replace(out)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise CommandFailed(f"the bundle cannot be written to {out}: {error.strerror}") from error


def now() -> datetime:
    return datetime.now(UTC)
