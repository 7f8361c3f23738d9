"""Pauses answers after a given number of tokens, so that a test can act while they are running, at any speed."""

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.stack import Stack
from tests.fixtures.held_answers import says_held

WITHIN_S = 60.0
POLL_S = 0.01


@dataclass(frozen=True)
class Held:
    stack: Stack
    name: str

    @property
    def workers(self) -> list[str]:
        """Names of the decode workers with a paused answer."""
        return [name for name, each in self.stack.processes.items() if says_held(self.name) in each.text()]

    async def worker(self) -> str:
        """Wait for a decode worker with a paused answer, and return its name."""
        async with asyncio.timeout(WITHIN_S):
            while not (found := self.workers):
                await asyncio.sleep(POLL_S)
        return found[0]

    def let_go(self) -> None:
        """Continue the answers."""
        file_of(self.stack).unlink(missing_ok=True)


def file_of(stack: Stack) -> Path:
    return stack.folder / "hold"


def make_answers_holdable(stack: Stack) -> None:
    """Change the commands of decode workers that are not started yet so that `answers_held` works."""
    for name, process in stack.processes.items():
        if name.startswith("decode"):
            process.command[2:2] = ["tests.fixtures.held_answers", str(file_of(stack))]


@contextmanager
def answers_held(stack: Stack, tokens: int) -> Iterator[Held]:
    """Pause decode workers when an answer has that many tokens, until the block is left or `let_go` is called.

    Clients and routers time out as usual, so the block must be short.
    """
    file, held = file_of(stack), Held(stack, uuid.uuid4().hex)
    written = file.with_suffix(".new")
    written.write_text(f"{tokens} {held.name}")
    written.rename(file)  # atomic: a worker never reads half of it
    try:
        yield held
    finally:
        held.let_go()
