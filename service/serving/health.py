"""grpc.health.v1 of one process: one truth for all of its servers.

Without the package of that service a process serves all the same, without health checks: a bare GPU machine has none.
"""

from collections.abc import Iterable
from typing import Protocol

import grpc

SERVICE_NAME = "grpc.health.v1.Health"


class Answers(Protocol):
    """To health checks."""

    def register(self, server: grpc.aio.Server) -> None: ...

    async def set(self, name: str, serving: bool) -> None: ...

    async def drain(self) -> None: ...


class Health:
    """Reports for `""` (the whole process) and for each named service whether it serves."""

    def __init__(self, service_names: Iterable[str]) -> None:
        self._names = ("", *service_names)
        self._answers = _answers()
        self._serving = False

    @property
    def serving(self) -> bool:
        return self._serving

    def register(self, server: grpc.aio.Server) -> None:
        self._answers.register(server)

    async def set_serving(self, serving: bool) -> None:
        """Changes nothing any more once the process drains."""
        for name in self._names:
            await self._answers.set(name, serving)
        self._serving = serving

    async def drain(self) -> None:
        """NOT_SERVING for good."""
        self._serving = False
        await self._answers.drain()


def _answers() -> Answers:
    try:
        from baton.service.serving.health_service import HealthService
    except ModuleNotFoundError:
        return Unanswered()
    return HealthService()


class Unanswered:
    def register(self, server: grpc.aio.Server) -> None:
        pass

    async def set(self, name: str, serving: bool) -> None:
        pass

    async def drain(self) -> None:
        pass
