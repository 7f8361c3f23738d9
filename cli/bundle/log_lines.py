"""Allow-list of log lines that may leave this machine.

A message is kept, without quoted text, if it matches a template in the source of its logger. A traceback keeps file
names and error types, without messages. Lines of Redis, crash dumps and `baton up` are recognised by their format. All
other lines are counted.
"""

import ast
import json
import re
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import groupby
from pathlib import Path

from baton.launch.paths import ROOT

MAX_CHARACTERS = 400  # characters kept of a message

_PREFIX = re.compile(r"(?P<name>[\w-]+) *\| (?P<rest>.*)", re.DOTALL)
_OWN = re.compile(r"(?P<head>\d\d:\d\d:\d\d\.\d{3} [A-Z]+ [\w-]+ (?P<logger>[\w.]+)): (?P<message>.*)")
_IDS = re.compile(r"(?: (?:trace_id|request_id)=[\w.:-]{1,80})+$")
_REDIS = re.compile(r"\d+:[XCSM] \d\d \w{3} \d{4} [\d:.]+ [.*#-] .*")
_PLACE = re.compile(r'\s*File "[^"\n]+", line \d+(?: in [\w<>.]+|, in [\w<>.]+)?')
_CRASH = re.compile(
    r"Traceback \(most recent call last\):|(Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):"
    r"|Fatal Python error: [\w ]+|Timeout \(\d+:\d\d:\d\d\)!|The above exception was the direct cause .*"
    r"|During handling of the above exception, another exception occurred:|\s*\+ Exception Group Traceback.*"
)
_ERROR = re.compile(
    r"(?P<kind>(?:\w+\.)*_?(?:[A-Z]\w*)?"
    r"(?:Error|Exception|Interrupt|Exit|Warning|Failed|Group|Unavailable|Refused|Expired|Lost))(?:: .*)?"
)
_QUOTED = re.compile(r"(?<!\w)(?:'[^']*(?:'|$)|\"[^\"]*(?:\"|$)|`[^`]*(?:`|$)|“[^”]*(?:”|$))")
_CONVERSION = re.compile(r"%(?:%|[-#0 +]*\d*(?:\.\d+)?[sdrgfixXe])")
_IDENTIFIER = re.compile(r"[\w.:/+-]{1,128}")
_JSON_NAMES = ("time", "level", "process", "logger", "trace_id", "request_id")


def safe_lines(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines that may leave this machine, and a count in place of consecutive other lines."""
    kept = (safe_line(line.rstrip("\r\n")) for line in lines if line.strip())
    for is_unknown, group in groupby(kept, key=lambda line: line is None):
        found = list(group)
        if is_unknown:
            yield f"[{len(found)} line{'s' * (len(found) > 1)} of others left out]"
        yield from filter(None, found)


def safe_line(line: str) -> str | None:
    """Return the line that may leave this machine, with the process name from `up`; None if its format is unknown."""
    found = _PREFIX.fullmatch(line)
    if found is None:
        return _safe(line)
    name, rest = found["name"], found["rest"]
    kept = _without_quotes(rest) if name == "baton" else _safe(rest)
    return None if kept is None else f"{name:<9} | {kept}"


def _safe(line: str) -> str | None:
    if line.startswith("{"):
        return _json_line(line)
    if (own := _OWN.fullmatch(line)) is not None:
        ids = _IDS.search(own["message"])
        end = ids.start() if ids else len(own["message"])
        return f"{own['head']}: {_message(own['logger'], own['message'][:end])}{ids[0] if ids else ''}"
    if _REDIS.fullmatch(line):
        return _without_quotes(line)
    if (place := _PLACE.match(line)) is not None:
        return place[0]
    if _CRASH.fullmatch(line):
        return line[:MAX_CHARACTERS]
    error = _ERROR.fullmatch(line)
    return f"{error['kind']}: [message left out]" if error else None


def _json_line(line: str) -> str | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    if not isinstance(entry, dict) or not isinstance(entry.get("message"), str):
        return None
    kept = {name: entry[name] for name in _JSON_NAMES if _IDENTIFIER.fullmatch(str(entry.get(name) or ""))}
    kept["message"] = _message(str(entry.get("logger")), entry["message"])
    if isinstance(entry.get("exception"), str):
        kept["exception"] = "\n".join(safe_lines(entry["exception"].splitlines()))
    return json.dumps(kept)


def _message(logger: str, message: str) -> str:
    if any(template.fullmatch(message) for template in _templates(logger)):
        return _without_quotes(message)
    return f"[{len(message)} characters left out: not of a message that {logger} is known to write]"


def _without_quotes(text: str) -> str:
    return _QUOTED.sub(lambda quoted: f"{quoted[0][0]}…{quoted[0][0]}", text)[:MAX_CHARACTERS]


@cache
def _templates(logger: str) -> list[re.Pattern[str]]:
    """Return the patterns of the messages that a module logs, from its source."""
    path = ROOT.joinpath(*logger.split(".")[1:]).with_suffix(".py")
    if not logger.startswith("baton.") or not path.is_file():
        return []
    patterns = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="logger")), args=[ast.Constant(value=str(template)), *_]
            ):
                patterns.append(re.compile(".*".join(map(re.escape, _CONVERSION.split(template)))))
    return patterns


def tail(path: Path, max_bytes: int) -> list[str]:
    """Return the last complete lines of a file. Raises: OSError."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - max_bytes))
        content = file.read(max_bytes)
    lines = content.decode(errors="replace").splitlines()
    return lines[1:] if size > max_bytes else lines
