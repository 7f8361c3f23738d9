"""The cost of gRPC itself: a server that writes messages of the size of a delta to each stream at a set pace.

`python -m baton.benchmarks.router.floor PORT INTERVAL_MS`. A message begins with the monotonic
nanoseconds of its making.
"""

import asyncio
import itertools
import sys
import time
from typing import Any

import grpc

from baton.service.serving.grpc_options import SERVER_OPTIONS
from baton.service.serving.server import run

METHOD = "/baton.bench.Floor/Stream"
TIME_BYTES = 8
MESSAGE_BYTES = 16  # as a delta of one token has


class Floor:
    """All streams wait for the same ticks, as the streams of a router wait for its workers' steps."""

    def __init__(self) -> None:
        self._tick: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def tick(self) -> None:
        done, self._tick = self._tick, asyncio.get_running_loop().create_future()
        done.set_result(time.monotonic_ns().to_bytes(TIME_BYTES, "little").ljust(MESSAGE_BYTES, b"\0"))

    async def stream(self, request: bytes, context: Any) -> None:
        """As many messages as the request asks for."""
        for _ in range(int(request)):
            await context.write(await asyncio.shield(self._tick))


async def serve(port: int, interval_s: float) -> int:
    """Until it is killed."""
    floor = Floor()
    service, method = METHOD.strip("/").split("/")
    handler: Any = grpc.unary_stream_rpc_method_handler(floor.stream)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    begun_s = time.monotonic()
    for tick in itertools.count(1):
        await asyncio.sleep(max(0.0, begun_s + tick * interval_s - time.monotonic()))
        floor.tick()
    return 0


if __name__ == "__main__":
    sys.exit(run(serve(int(sys.argv[1]), float(sys.argv[2]) / 1e3)))
