"""Prompts that were given up half landed because their source was lost, and are to be tried again here.

What is certain of them goes into the cache when the copy under way has ended. The next attempt at the same prompt waits
for that: it is sent right behind the command that gave the first one up.
"""

import asyncio

LONGEST_COPY_S = 2.0
"""Nobody waits longer; what is not in the cache by then is pulled again."""


class HandedOn:
    def __init__(self) -> None:
        self._ending: dict[bytes, asyncio.Task[None]] = {}  # by the hash of the prompt's first block

    def __len__(self) -> int:
        return len(self._ending)

    def add(self, first_block: bytes, task: "asyncio.Task[None]") -> None:
        """`first_block`: its hash; empty for a prompt that keeps out of the cache.

        The pages of the prompt are given back when `task` has ended, by a callback that it has already.
        """
        if first_block:
            self._ending[first_block] = task
            task.add_done_callback(lambda ended: self._forget(first_block, ended))

    async def settled(self, first_block: bytes) -> None:
        """Waits for a prompt that begins like this one, if there is any."""
        ending = self._ending.get(first_block)
        if ending is not None:
            await asyncio.wait([ending], timeout=LONGEST_COPY_S)

    def _forget(self, first_block: bytes, ended: "asyncio.Task[None]") -> None:
        if self._ending.get(first_block) is ended:
            del self._ending[first_block]
