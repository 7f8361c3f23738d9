"""Adapters as they are given on a command line, `NAME=FOLDER`. Does not look into the folder."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/-]{0,127}")


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    name: str  # by which requests choose it
    folder: Path

    def __str__(self) -> str:
        return f"{self.name}={self.folder}"


def parse_adapters(text: str | Sequence[str]) -> tuple[AdapterFolder, ...]:
    """From `NAME=FOLDER,NAME=FOLDER`, or a sequence of such pairs. Raises: ValueError."""
    parts = text.split(",") if isinstance(text, str) else text
    adapters: dict[str, AdapterFolder] = {}
    for part in filter(None, (part.strip() for part in parts)):
        name, equals, folder = part.partition("=")
        if not (equals and folder and NAME.fullmatch(name)):
            raise ValueError(f"{part!r} is not of the form NAME=FOLDER, with a name of letters, digits and _ . : / -")
        if name in adapters:
            raise ValueError(f"the name {name!r} is given twice")
        adapters[name] = AdapterFolder(name, Path(folder).expanduser())
    return tuple(adapters.values())
