"""Waiting for a process to serve."""

import pytest

from baton.client import ClusterStatus, Model, WorkerStatus
from baton.launch.readiness import HealthState, NotReady, check_health, wait_until_serving, waiting_for
from baton.process.registry.redis_server import free_port
from baton.process.serving.health import Health as HealthService
from tests.fixtures.servers import loop_server


async def silent() -> str:
    return ""


async def test_check_health_follows_the_process() -> None:
    assert await check_health(f"127.0.0.1:{free_port()}") is HealthState.UNREACHABLE
    health = HealthService(())
    async with loop_server(health.register) as port:
        await health.set_serving(False)
        assert await check_health(f"127.0.0.1:{port}") is HealthState.NOT_SERVING
        await health.set_serving(True)
        assert await check_health(f"127.0.0.1:{port}") is HealthState.SERVING


async def test_wait_until_serving_reports_and_returns() -> None:
    health = HealthService(())
    await health.set_serving(False)
    asked = 0

    async def explain() -> str:
        nonlocal asked
        asked += 1
        await health.set_serving(True)
        return "no prefill worker" if asked < 3 else ""

    said: list[str] = []
    async with loop_server(health.register) as port:
        await wait_until_serving(f"127.0.0.1:{port}", 30, said.append, explain, say_after_s=0.0)
    assert asked == 3
    assert [word.partition(": ")[2] for word in said] == ["no prefill worker"]


async def test_wait_until_serving_times_out_with_last_state() -> None:
    with pytest.raises(NotReady, match=r"unreachable after 0\.3 s"):
        await wait_until_serving(f"127.0.0.1:{free_port()}", 0.3, print, silent)


async def test_wait_until_serving_ignores_other_run() -> None:
    """Two `baton up` on one port: the router of the first must not make the second one ready."""
    health = HealthService((), run_id="first")
    await health.set_serving(True)
    async with loop_server(health.register) as port:
        await wait_until_serving(f"127.0.0.1:{port}", 30, print, silent, run_id="first")
        with pytest.raises(NotReady, match="of another run"):
            await wait_until_serving(f"127.0.0.1:{port}", 1.0, print, silent, run_id="second")


def status(*connected: tuple[str, bool], registry: bool = True) -> ClusterStatus:
    workers = tuple(
        WorkerStatus(
            *(name, "decode", "127.0.0.1:1", 1, 1, is_connected),
            *("", Model("tiny", 1, 1, "float32", 32), "", 0, 0, 0, None),
        )
        for name, is_connected in connected
    )
    return ClusterStatus(False, "the readiness probe is running", registry, 0, 0, workers)


def test_waiting_for_names_unconnected_workers() -> None:
    expected = ["prefill-0", "decode-0", "decode-1"]
    said = waiting_for(expected, status(("decode-0", True), ("decode-1", False)))
    assert said.startswith("waiting for prefill-0, decode-1, which connect when")
    assert waiting_for(expected, status(registry=False)).endswith("Redis does not answer")


def test_waiting_for_connected_workers_is_router_detail() -> None:
    assert waiting_for(["decode-0"], status(("decode-0", True))) == "the readiness probe is running"
