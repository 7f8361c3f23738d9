"""Which processes of the stack serve, as all routers see it, looked at again and again while a run lasts."""

import asyncio
import time
from collections.abc import Mapping, Sequence

from chaos.background import Background
from chaos.stack import Place, Stack
from client import ClusterStatus

PERIOD_S = 0.15


def unsound(
    redis: Place, routers: Mapping[str, ClusterStatus | None], workers: Sequence[Place], running: Sequence[str]
) -> dict[str, str]:
    """What is wrong with whom. `routers`: what each of them answers; None: nothing. Pure."""
    found = dict.fromkeys((redis.name, *routers, *(each.name for each in workers)), "is not running")
    found = {name: word for name, word in found.items() if name not in running}
    for router, status in routers.items():
        if router in found:
            continue
        if status is None:
            found[router] = "does not answer"
            continue
        if not status.ready:
            found[router] = status.detail or "is not ready"
        if not status.registry_connected:
            found.setdefault(redis.name, f"{router} does not reach it")
        there = {worker.worker_id for worker in status.workers if worker.connected and worker.load is not None}
        for worker in workers:
            if worker.name not in there:
                found.setdefault(worker.name, f"{router} does not have it")
    return found


class Soundness(Background):
    """From `start` to `stop`."""

    def __init__(self, stack: Stack) -> None:
        super().__init__()
        self._stack = stack
        self._looked = asyncio.Condition()
        self._began_s = float("-inf")  # of the last look that has ended
        self.unsound: dict[str, str] = {"the stack": "was not looked at"}

    async def next_look(self) -> None:
        """Returns after a look that began after this call."""
        since_s = time.monotonic()
        async with self._looked:
            await self._looked.wait_for(lambda: self._began_s >= since_s)

    async def recovered(self, names: frozenset[str], within_s: float) -> str:
        """What is still wrong with these after so long; empty as soon as nothing is."""
        until_s = time.monotonic() + within_s
        while True:
            await self.next_look()
            wrong = [f"{name} {word}" for name, word in self.unsound.items() if name in names]
            if not wrong or time.monotonic() > until_s:
                return f"after {within_s:g} s: {'; '.join(wrong)}" if wrong else ""

    async def _run(self) -> None:
        stack = self._stack
        while True:
            began_s = time.monotonic()
            statuses = await stack.statuses()
            told = {router.name: status for router, status in zip(stack.routers, statuses, strict=True)}
            running = [name for name in stack.places if stack.life(name) is not None]
            async with self._looked:
                self.unsound, self._began_s = unsound(stack.redis, told, stack.workers, running), began_s
                self._looked.notify_all()
            await asyncio.sleep(PERIOD_S)
