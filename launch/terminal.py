"""Lines of a run as a person reads them at a terminal: short and coloured. The log files keep the complete lines."""

import os
import re
import shutil
from collections.abc import Callable
from typing import TextIO

COLOURS = {"WARNING": "\x1b[33m", "ERROR": "\x1b[31m", "CRITICAL": "\x1b[31m"}
NAME, PLAIN = "\x1b[2m", "\x1b[0m"
_LOG_LINE = re.compile(
    r"(?P<name>\S+ *) \| (?P<time>\d\d:\d\d:\d\d)\.\d{3} (?P<level>[A-Z]+) \S+ [\w.]+: (?P<message>.*?)"
    r"(?: trace_id=\w+)?(?: request_id=\S+)?"
)


def shortened(line: str, columns: int, colours: bool) -> str:
    """`router    | 12:00:00.123 INFO router baton.x: text` -> `12:00:00 router    text`, cut at `columns`.

    Warnings and errors are not cut. A line of another form, such as those of `up`, is not changed.
    """
    found = _LOG_LINE.fullmatch(line)
    if found is None:
        return line
    level, name, message = found["level"], found["name"], found["message"]
    prefix = f"{found['time']} {name} "
    if level not in COLOURS and len(prefix) + len(message) > columns:
        message = message[: max(0, columns - len(prefix) - 1)] + "…"
    if not colours:
        return f"{prefix}{message}"
    return f"{NAME}{prefix}{PLAIN}{COLOURS.get(level, '')}{message}{PLAIN}"


def form_for(stream: TextIO) -> Callable[[str], str]:
    """Short lines where `stream` is a terminal, coloured unless NO_COLOR is set; elsewhere lines as they are."""
    if not stream.isatty():
        return str
    colours = not os.environ.get("NO_COLOR")
    return lambda line: shortened(line, shutil.get_terminal_size().columns, colours)
