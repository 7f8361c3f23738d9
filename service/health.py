"""grpc.health.v1 of one process: one truth for all of its servers. `set_serving` is called before they start."""

from collections.abc import Iterable

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

SERVICE_NAME = health.SERVICE_NAME


class Health:
    """Says for `""` (the whole process) and for each named service whether it serves."""

    def __init__(self, service_names: Iterable[str]) -> None:
        self._names = ("", *service_names)
        self._servicer = health.aio.HealthServicer()
        self._serving = False

    @property
    def serving(self) -> bool:
        return self._serving

    def register(self, server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set_serving(self, serving: bool) -> None:
        """Changes nothing any more once the process drains."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._names:
            await self._servicer.set(name, status)
        self._serving = serving

    async def drain(self) -> None:
        """NOT_SERVING for good."""
        self._serving = False
        await self._servicer.enter_graceful_shutdown()
