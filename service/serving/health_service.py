"""The service grpc.health.v1 itself, by the package grpcio-health-checking."""

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc


class HealthService:
    def __init__(self) -> None:
        self._servicer = health.aio.HealthServicer()

    def register(self, server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set(self, name: str, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._servicer.set(name, status)

    async def drain(self) -> None:
        await self._servicer.enter_graceful_shutdown()
