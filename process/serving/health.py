"""Health service (grpc.health.v1) of one process: one state for all of its servers.

Without the package of that service a process serves all the same, without health checks: a bare GPU machine has none.
"""

from collections.abc import Iterable
from typing import Any

import grpc

SERVICE_NAME = "grpc.health.v1.Health"
RUN_ID_KEY = "baton-run-id"
"""Metadata of the answers to Check: the run of `baton up` that a process belongs to."""


class Health:
    """Reports for `""` (the whole process) and for each named service whether it serves."""

    def __init__(self, service_names: Iterable[str], run_id: str = "") -> None:
        self._names = ("", *service_names)
        self._servicer = _servicer(run_id)
        self._serving = False

    @property
    def serving(self) -> bool:
        return self._serving

    def register(self, server: grpc.aio.Server) -> None:
        if self._servicer is not None:
            from grpc_health.v1 import health_pb2_grpc

            health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set_serving(self, serving: bool) -> None:
        """Changes nothing any more once the process drains."""
        if self._servicer is not None:
            from grpc_health.v1.health_pb2 import HealthCheckResponse

            status = HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING
            for name in self._names:
                await self._servicer.set(name, status)
        self._serving = serving

    async def drain(self) -> None:
        """NOT_SERVING for good."""
        self._serving = False
        if self._servicer is not None:
            await self._servicer.enter_graceful_shutdown()


def _servicer(run_id: str) -> Any:
    """Return the servicer; None without the package."""
    try:
        from grpc_health.v1 import health
    except ModuleNotFoundError:
        return None

    class IdentifiedServicer(health.aio.HealthServicer):
        async def Check(self, request: Any, context: Any) -> Any:
            await context.send_initial_metadata(((RUN_ID_KEY, run_id),))
            return await super().Check(request, context)

    return IdentifiedServicer()
