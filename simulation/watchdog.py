"""The watchdog of a simulated process, whose looks come in virtual time."""

import asyncio
from collections.abc import Callable

from service.watchdog import Watchdog
from simulation.loop import Planned, SimulatedLoop


class SimulatedWatchdog(Watchdog):
    """All of the real one but the thread. A process that hangs does not look, as one that is stopped does not."""

    def __init__(self, bound_s: float, end_process: Callable[[str, float], None]) -> None:
        loop = asyncio.get_running_loop()
        if not isinstance(loop, SimulatedLoop):
            raise TypeError("a simulated watchdog needs a simulated loop")
        super().__init__(bound_s, end_process, loop.time)
        self._loop = loop
        self._next: Planned | None = None

    def start(self) -> None:
        self._next = self._loop.call_later(self._period_s, self._look_again)

    def close(self) -> None:
        if self._next is not None:
            self._next.cancel()

    def _look_again(self) -> None:
        self.look()
        self.start()
