"""Golden texts of the formats: what a model writes, where that is documented, and what a client is to get.

`events` are texts (`text`), thoughts (`thought`) and calls, by the function's name, each with its text or arguments.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.text.output.pieces import CallArguments, CallStart, OutputPiece, Thought, ToolParser

FOLDER = Path(__file__).parent / "golden"
Event = tuple[str, str]


@dataclass(frozen=True)
class Golden:
    format: str
    tools: Mapping[str, Mapping[str, Any]]
    text: str
    events: tuple[Event, ...]

    def __str__(self) -> str:
        return f"{self.format}: {self.text[:60]!r}"


def goldens() -> list[Golden]:
    found = []
    for path in sorted(FOLDER.glob("*.json")):
        read = json.loads(path.read_text(encoding="utf-8"))
        for case in read["cases"]:
            assert case["source"] in read["sources"], f"{path.name}: where is {case['text']!r} from?"
            events = tuple((kind, text) for kind, text in case["events"])
            found.append(Golden(read["format"], read["tools"], case["text"], events))
    return found


def fed(parser: ToolParser, parts: Iterable[str]) -> tuple[Event, ...]:
    """The events of a text that comes in these parts: neighbours of one kind are one."""
    pieces = [piece for part in parts for piece in parser.push(part)]
    return events_of([*pieces, *parser.finish()])


def events_of(pieces: Sequence[OutputPiece]) -> tuple[Event, ...]:
    events = list[Event]()
    calls = 0
    for piece in pieces:
        match piece:
            case CallStart(index, call_id, name):
                assert index == calls and call_id, "calls are numbered in their order"
                calls += 1
                events.append((name, ""))
            case CallArguments(index, arguments):
                name, before = events[-1]
                assert index == calls - 1 and arguments and name not in ("text", "thought")
                events[-1] = (name, before + arguments)
            case Thought(text):
                _add(events, "thought", text)
            case str():
                _add(events, "text", piece)
    return tuple(events)


def _add(events: list[Event], kind: str, text: str) -> None:
    assert text, "an empty piece"
    if events and events[-1][0] == kind:
        events[-1] = (kind, events[-1][1] + text)
    else:
        events.append((kind, text))
