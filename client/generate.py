"""Writes sync_client.py from async_client.py: `.venv/bin/python client/generate.py`."""

import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
HEADER = '''"""The blocking client and its calls. Generated from async_client.py by generate.py: edit that file."""

# ruff: noqa: C416, I001, UP028
'''
REPLACED = (
    (r"\b(async|await) ", ""),
    (r"\bAsync(BatonClient|AdminClient|Generator)\b", r"\1"),
    (r"\bAsync(Channels|Connection)\b", r"Sync\1"),
    (r"\b_AsyncClient\b", "_Client"),
    (r"\basync_transport\b", "sync_transport"),
    (r"\b(__)?a(enter__|exit__|close|closing)\b", r"\1\2"),
    (r"Belongs to the event loop of its first call", "May be shared between threads"),
)


def sync_source() -> str:
    """Return the source of the blocking client."""
    source = (FOLDER / "async_client.py").read_text().split("\n", 1)[1]
    for pattern, replacement in REPLACED:
        source = re.sub(pattern, replacement, source)
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(FOLDER / "sync_client.py"), "-"]
    return subprocess.run(command, input=HEADER + source, capture_output=True, text=True, check=True, timeout=60).stdout


if __name__ == "__main__":
    (FOLDER / "sync_client.py").write_text(sync_source())
