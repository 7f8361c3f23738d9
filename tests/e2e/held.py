"""Answers that stand still in their middle, however fast they are and however late a test comes to look."""

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
        """The names of those that have an answer that stands still."""
        return [name for name, each in self.stack.processes.items() if says_held(self.name) in each.text()]

    async def worker(self) -> str:
        """The name of one of them, as soon as there is one."""
        async with asyncio.timeout(WITHIN_S):
            while not (found := self.workers):
                await asyncio.sleep(POLL_S)
        return found[0]

    def let_go(self) -> None:
        """Answers go on to their ends."""
        file_of(self.stack).unlink(missing_ok=True)


def file_of(stack: Stack) -> Path:
    return stack.folder / "hold"


def make_answers_holdable(stack: Stack) -> None:
    """Those of its decode workers, which are still to be started."""
    for name, process in stack.processes.items():
        if name.startswith("decode"):
            process.command[2:2] = ["tests.fixtures.held_answers", str(file_of(stack))]


@contextmanager
def answers_held(stack: Stack, tokens: int) -> Iterator[Held]:
    """Decode workers with an answer of so many tokens compute nothing until the end of this, or until they are let go.

    For moments: clients wait only so long.
    """
    file, held = file_of(stack), Held(stack, uuid.uuid4().hex)
    written = file.with_suffix(".new")
    written.write_text(f"{tokens} {held.name}")
    written.rename(file)  # at once with what is in it
    try:
        yield held
    finally:
        held.let_go()
