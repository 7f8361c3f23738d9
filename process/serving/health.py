"""Health service (grpc.health.v1) of a process, with one state for all its servers.

Without the package grpc_health, as on a bare GPU machine, the process serves without health checks.
"""

from collections.abc import Iterable
from typing import Any

import grpc

SERVICE_NAME = "grpc.health.v1.Health"
RUN_ID_KEY = "baton-run-id"
"""Metadata key of responses to Check: id of the `baton up` run that the process belongs to."""


class Health:
    """Health of the process (service `""`) and of each named service, which always have the same state."""

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
        """Set the state; has no effect after `drain`."""
        if self._servicer is not None:
            from grpc_health.v1.health_pb2 import HealthCheckResponse

            status = HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING
            for name in self._names:
                await self._servicer.set(name, status)
        self._serving = serving

    async def drain(self) -> None:
        """Report NOT_SERVING until the process exits."""
        self._serving = False
        if self._servicer is not None:
            await self._servicer.enter_graceful_shutdown()


def _servicer(run_id: str) -> Any:
    """Return the servicer; None without its package."""
    try:
        from grpc_health.v1 import health
    except ModuleNotFoundError:
        return None

    class IdentifiedServicer(health.aio.HealthServicer):
        async def Check(self, request: Any, context: Any) -> Any:
            await context.send_initial_metadata(((RUN_ID_KEY, run_id),))
            return await super().Check(request, context)

    return IdentifiedServicer()
