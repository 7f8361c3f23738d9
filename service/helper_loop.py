"""The inside of a helper process: answers frames from its standard input, which is a socket, until that ends.

Frames both ways are a length of 8 bytes, little-endian, and so many bytes.
"""

import os
import resource
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

LENGTH_BYTES = 8
NICENESS = 10  # a client that waits for one token comes before one that sent megabytes
_MORE_MEMORY_BYTES = 1 << 30  # of address space, beyond that at the start

Buffer = bytes | bytearray | memoryview


def frame(parts: Sequence[Buffer]) -> list[Buffer]:
    """The parts as one frame, copied nowhere."""
    return [sum(map(len, parts)).to_bytes(LENGTH_BYTES, "little"), *parts]


def answer_frames(answer: Callable[[memoryview], Sequence[Buffer]]) -> int:
    """An exception from `answer` ends the process, and so the caller's request fails. Returns the exit code."""
    os.nice(NICENESS)
    _limit_memory()
    with socket.socket(fileno=os.dup(sys.stdin.fileno())) as parent:
        while (length := _read(parent, LENGTH_BYTES)) is not None:
            asked = _read(parent, int.from_bytes(length, "little"))
            if asked is None:
                break
            for part in frame(answer(memoryview(asked))):
                parent.sendall(part)
    return 0


def _read(parent: socket.socket, size: int) -> bytearray | None:
    """None at the end."""
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        read = parent.recv_into(rest)
        if not read:
            return None
        rest = rest[read:]
    return data


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    most = pages * os.sysconf("SC_PAGE_SIZE") + _MORE_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
