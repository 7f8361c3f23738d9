"""What goes on beside a run, in a task of its own."""

import asyncio
from abc import ABC, abstractmethod


class Background(ABC):
    """From `start` to `stop`, each at most once."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Changes nothing where it was never started."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @abstractmethod
    async def _run(self) -> None:
        """Until cancelled."""
