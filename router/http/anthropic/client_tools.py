"""Anthropic's tools that the client runs: description and schema by type. Pure.

A client sends only the type and name of such a tool, since Anthropic's models know its arguments. Other models get
them from here, and call the tool like any other function.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_TEXT: Mapping[str, Any] = {"type": "string"}
_LINES: Mapping[str, Any] = {
    "type": "array",
    "items": {"type": "integer"},
    "minItems": 2,
    "maxItems": 2,
    "description": "First and last line to view, from 1; -1 for the last line of the file.",
}
_LINE: Mapping[str, Any] = {
    "type": "integer",
    "description": "Line after which insert adds text; 0: the beginning.",
}


@dataclass(frozen=True, slots=True)
class ClientToolForm:
    description: str
    properties: Mapping[str, Any]
    required: Sequence[str] = ()

    @property
    def schema(self) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": dict(self.properties),
            "required": list(self.required),
            "additionalProperties": False,
        }


_BASH = ClientToolForm(
    "Run a command in the user's bash session, which keeps its state between calls.",
    {
        "command": {**_TEXT, "description": "Command to run. Required unless restart is true."},
        "restart": {"type": "boolean", "description": "true: restart the session instead of running a command."},
    },
)


def _editor(commands: Sequence[str], inserted: str) -> ClientToolForm:
    """Return a version of the text editor. `inserted`: argument with the text of insert."""
    properties = {
        "command": {**_TEXT, "enum": list(commands)},
        "path": {**_TEXT, "description": "Path of the file, or of the directory for view."},
        "view_range": _LINES,
        "file_text": {**_TEXT, "description": "Content of the file that create writes."},
        "old_str": {**_TEXT, "description": "Text that str_replace replaces; it must occur in the file exactly once."},
        "new_str": {**_TEXT, "description": "Text that replaces old_str; without it, old_str is deleted."},
        "insert_line": _LINE,
    }
    also = "Text that replaces old_str, or that" if inserted in properties else "Text that"
    properties[inserted] = {**_TEXT, "description": f"{also} insert adds."}
    return ClientToolForm("View, create and edit the user's text files.", properties, ("command", "path"))


_COMMANDS = ("view", "create", "str_replace", "insert")
_OLDER_EDITOR = _editor((*_COMMANDS, "undo_edit"), "new_str")
_EDITOR = _editor(_COMMANDS, "insert_text")
_MEMORY = ClientToolForm(
    "Read and write notes in the directory /memories, which are kept for later conversations.",
    {
        **_EDITOR.properties,
        "command": {**_TEXT, "enum": [*_COMMANDS, "delete", "rename"]},
        "path": {**_TEXT, "description": "Path in /memories. Required by all commands except rename."},
        "old_path": {**_TEXT, "description": "Path that rename changes."},
        "new_path": {**_TEXT, "description": "Path after rename."},
    },
    ("command",),
)

CLIENT_TOOLS: Mapping[str, ClientToolForm] = {
    "bash_20241022": _BASH,
    "bash_20250124": _BASH,
    "text_editor_20241022": _OLDER_EDITOR,
    "text_editor_20250124": _OLDER_EDITOR,
    "text_editor_20250429": _EDITOR,
    "text_editor_20250728": _EDITOR,
    "memory_20250818": _MEMORY,
}
