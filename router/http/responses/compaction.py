"""Compaction: the model summarises a conversation, and the client sends the summary back as an opaque item. Pure."""

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

from baton.router.http.edge.problem import refused

PROMPT = """Summarise the conversation so far for an assistant that will continue it and sees only your summary and \
the user's messages. State the user's goal and constraints, what was done and found out (names of files, commands, \
values, errors), decisions with their reasons, and what is still to do. Be complete and brief. Write nothing else."""
MAX_SUMMARY_TOKENS = 4096
"""Default maximum length of a summary."""
_BEFORE = "Summary of the conversation so far, which continues below:\n\n"
_FORMAT = 1


def sealed(summary: str) -> str:
    """Return a summary as the opaque text of an item. It is not encrypted: the client may read it."""
    return base64.urlsafe_b64encode(json.dumps([_FORMAT, summary]).encode()).decode()


def opened(content: str) -> str:
    """Return the summary in an item. Raises: Problem if another server wrote it."""
    try:
        form, summary = json.loads(base64.b64decode(content.encode(), b"-_", validate=True))
        if form == _FORMAT and isinstance(summary, str):
            return summary
    except (ValueError, TypeError):
        pass
    raise refused("input", "has a compaction item that this server did not write; send the conversation instead")


def summary_message(content: str) -> dict[str, str]:
    """Return the chat message for a compaction item."""
    return {"role": "user", "content": _BEFORE + opened(content)}


def compacted(items: Sequence[Mapping[str, Any]], item_id: str, summary: str) -> list[Mapping[str, Any]]:
    """Return the items that replace a conversation: the user's messages, then the summary."""
    kept = [item for item in items if item["type"] == "message" and item["role"] == "user"]
    return [*kept, {"type": "compaction", "id": item_id, "encrypted_content": sealed(summary)}]
