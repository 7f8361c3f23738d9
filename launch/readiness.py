"""Health of a process (grpc.health.v1): ask once, or wait until it serves."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.client import ClusterStatus
from baton.process.serving.health import RUN_ID_KEY

CALL_TIMEOUT_S = 2.0
POLL_S = 0.1
SAY_AFTER_S = 5.0


class HealthState(Enum):
    SERVING = "serving"
    NOT_SERVING = "not serving"
    UNREACHABLE = "unreachable"
    OTHER_RUN = "of another run"


class NotReady(Exception):
    """Error: the service did not become ready in time."""


async def check_health(
    target: str, timeout_s: float = CALL_TIMEOUT_S, open_channel: Callable[[str], grpc.aio.Channel] | None = None
) -> HealthState:
    """Return the health of the process at host:port `target`. `open_channel`: None for a channel without TLS."""
    async with (open_channel or grpc.aio.insecure_channel)(target) as channel:
        return await _check(health_pb2_grpc.HealthStub(channel), timeout_s)


async def wait_until_serving(
    target: str,
    timeout_s: float,
    report: Callable[[str], None],
    explain: Callable[[], Awaitable[str]],
    say_after_s: float = SAY_AFTER_S,
    run_id: str = "",
) -> None:
    """Wait until the process serves and `explain` returns an empty text. Raises: NotReady.

    Every `say_after_s` seconds, `report` gets the text of `explain` if it has changed. `run_id`: run whose process must
    answer; the health of another run does not count.
    """
    loop = asyncio.get_running_loop()
    started, reported, word, health = loop.time(), "", "", HealthState.UNREACHABLE
    next_word = started + say_after_s
    # Short reconnect delays; gRPC's defaults grow to minutes.
    options = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500))
    async with grpc.aio.insecure_channel(target, options=options) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while loop.time() - started < timeout_s:
            health = await _check(stub, CALL_TIMEOUT_S, run_id)
            if health is HealthState.SERVING or loop.time() >= next_word:
                word = await explain()
                if health is HealthState.SERVING and not word:
                    return
            if loop.time() >= next_word:
                if word and word != reported:
                    report(f"{loop.time() - started:.0f} s: {word}")
                reported, next_word = word, loop.time() + say_after_s
            await asyncio.sleep(POLL_S)
    raise NotReady(f"the router is {health.value} after {timeout_s:g} s" + (f": {word}" if word else ""))


def waiting_for(workers: Sequence[str], status: ClusterStatus) -> str:
    """Return a text that says what the start of a service waits for; empty if it waits for nothing. `workers`: ids of
    started workers.
    """
    connected = {worker.worker_id for worker in status.workers if worker.connected}
    missing = [worker for worker in workers if worker not in connected]
    if not missing:
        return status.detail
    redis = "" if status.registry_connected else "; Redis does not answer"
    return f"waiting for {', '.join(missing)}, which connect when their models are loaded{redis}"


async def _check(stub: Any, timeout_s: float, run_id: str = "") -> HealthState:
    try:
        call = stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=timeout_s)
        response, metadata = await call, dict(await call.initial_metadata())
    except grpc.aio.AioRpcError:
        return HealthState.UNREACHABLE
    if run_id and metadata.get(RUN_ID_KEY) != run_id:
        return HealthState.OTHER_RUN
    return HealthState.SERVING if response.status == health_pb2.HealthCheckResponse.SERVING else HealthState.NOT_SERVING
