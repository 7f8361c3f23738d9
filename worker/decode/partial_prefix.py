"""Prompts that were given up half landed because their source was lost, and are to be tried again here.

Their confirmed blocks go into the cache when the copy under way has ended. The next attempt at the same prompt waits
for that: it is sent right behind the command that gave the first one up, and begins with the same tokens.
"""

import asyncio
from collections.abc import Iterable

LONGEST_COPY_S = 2.0
"""No request waits longer; blocks that are not in the cache by then are pulled again."""


class PartialPrefixes:
    def __init__(self) -> None:
        # By the hash of the prompt's last block, which is chained over all tokens before: unrelated prompts share
        # their first blocks, and not this one.
        self._ending: dict[bytes, set[asyncio.Task[None]]] = {}

    def __len__(self) -> int:
        """Prompts that are waited for."""
        return sum(map(len, self._ending.values()))

    def add(self, last_block: bytes, task: "asyncio.Task[None]") -> None:
        """`last_block`: its hash; empty for a prompt that keeps out of the cache.

        The pages of the prompt are given back when `task` has ended, by a callback that it has already.
        """
        if last_block:
            self._ending.setdefault(last_block, set()).add(task)
            task.add_done_callback(lambda ended: self._forget(last_block, ended))

    async def settled(self, block_hashes: Iterable[bytes]) -> None:
        """Waits for the prompts that the prompt of these blocks continues, if there are any."""
        if self._ending:
            earlier = [task for each in block_hashes for task in self._ending.get(each, ())]
            if earlier:
                await asyncio.wait(earlier, timeout=LONGEST_COPY_S)

    def _forget(self, last_block: bytes, ended: "asyncio.Task[None]") -> None:
        tasks = self._ending[last_block]
        tasks.remove(ended)
        if not tasks:
            del self._ending[last_block]
