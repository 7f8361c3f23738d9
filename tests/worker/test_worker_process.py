"""The life of a worker process around an engine that a test plays."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.cli.keys import make_certificates
from baton.launch.readiness import HealthState as HealthOf
from baton.launch.readiness import check_health
from baton.process.config import ConfigError
from baton.process.registry.membership import Epoch
from baton.process.registry.redis_registry import RedisRegistry
from baton.process.registry.redis_server import free_ports, start_redis_server
from baton.process.registry.worker_record import WorkerRecord, WorkerRole
from baton.process.security.tls import InternalTls
from baton.process.serving.health import Health
from baton.process.serving.server import Listener, Running, serve
from baton.worker.config import WorkerConfig
from baton.worker.process import WorkerProcess
from tests.fixtures.session_client import eventually

FIRST = Epoch(1)


class FakeWorker:
    role = WorkerRole.DECODE
    fingerprint = b"f" * 32
    listener = Listener("127.0.0.1", 0, lambda server: None, ())

    def __init__(self) -> None:
        self.busy = False
        self.turns: int | None = None
        self.reports = 0
        self.draining = self.stopped = self.started = False
        self.report_error: Exception | None = None
        self.on_fault: Callable[[BaseException], None] = lambda fault: None

    async def start(self, on_fault: Callable[[BaseException], None], on_role: Callable[[Epoch], None]) -> None:
        self.started = True
        self.on_fault = on_fault

    def report(self) -> None:
        self.reports += 1
        if self.report_error is not None:
            raise self.report_error

    def begin_drain(self) -> None:
        self.draining = True

    async def stop(self) -> None:
        self.stopped = True


async def started(worker: FakeWorker, epoch: Epoch = FIRST, **config: Any) -> tuple[WorkerProcess, Running]:
    health = Health(())
    running = Running((1234,), health)
    process = WorkerProcess(WorkerConfig(worker_id="w", model=Path("m"), **config), worker, epoch)
    await process.start(running)
    return process, running


async def test_clock_epoch_yields_to_the_registrys_also_for_a_new_role() -> None:
    server, clock = start_redis_server(), Epoch(1_700_000_000_000, from_clock=True)
    registry = RedisRegistry(server.url, "baton")
    try:
        before = WorkerRecord("w", WorkerRole.DECODE, "127.0.0.1:7", 1_800_000_000_000, "ab")
        await registry.announce(before)
        await registry.withdraw(before)
        process, running = await started(FakeWorker(), clock, redis_url=server.url, namespace="baton")
        assert await announced(registry, 1_800_000_000_001) is WorkerRole.DECODE
        process.announce(clock)
        assert await announced(registry, 1_800_000_000_002) is WorkerRole.DECODE
        assert not running.stopping.is_set()
        await process.stop()
    finally:
        await registry.close()
        server.stop()


async def announced(registry: RedisRegistry, epoch: int) -> WorkerRole:
    """Its role, once it is announced under that epoch."""
    async with asyncio.timeout(20):
        found = await registry.workers()
        while [each.epoch for each in found] != [epoch]:
            await asyncio.sleep(0.01)
            found = await registry.workers()
    return found[0].role


async def test_worker_serves_once_it_has_started_and_reports_until_it_stops() -> None:
    worker = FakeWorker()
    process, running = await started(worker)
    assert running.health.serving
    await eventually(lambda: worker.reports >= 1)
    await process.stop()
    assert worker.stopped and not running.stopping.is_set()


async def test_drain_waits_for_open_requests() -> None:
    worker = FakeWorker()
    process, _ = await started(worker)
    worker.busy = True
    draining = asyncio.create_task(process.drain())
    await eventually(lambda: worker.draining)
    assert not draining.done()
    worker.busy = False
    async with asyncio.timeout(20):
        await draining
    await process.stop()


async def test_lost_engine_ends_the_process_without_waiting() -> None:
    worker = FakeWorker()
    process, running = await started(worker)
    worker.busy = True
    worker.on_fault(RuntimeError("the device is gone"))
    assert running.stopping.is_set() and running.exit_code == 1
    async with asyncio.timeout(20):
        await process.drain()
    assert not worker.draining, "routers would take its death for an end that was asked for"
    await process.stop()


async def test_error_in_the_reports_ends_the_process(caplog: pytest.LogCaptureFixture) -> None:
    worker = FakeWorker()
    worker.report_error = ValueError("no such load")
    process, running = await started(worker)
    await eventually(running.stopping.is_set)
    assert running.exit_code == 1 and "no such load" in caplog.text
    await process.stop()


@pytest.mark.parametrize(
    ("given", "who"),
    [
        ({}, "process of this machine"),
        ({"host": "0.0.0.0", "advertise": "node-1"}, "host that reaches it"),
        ({"secret": "a secret of this test"}, None),
    ],
)
async def test_worker_without_a_secret_warns_about_its_callers(
    given: dict[str, Any], who: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    process, _ = await started(FakeWorker(), **given)
    await process.stop()
    told = [line for line in caplog.messages if "no secret" in line]
    assert len(told) == (who is not None) and all(str(who) in line for line in told)


async def test_wildcard_address_needs_a_name_before_anything_is_loaded() -> None:
    worker = FakeWorker()
    with pytest.raises(ConfigError, match="--advertise"):
        await started(worker, host="0.0.0.0")
    assert not worker.started
    process, _ = await started(worker, host="0.0.0.0", advertise="node-1")
    await process.stop()


async def test_ipv6_address_is_announced_in_brackets(caplog: pytest.LogCaptureFixture) -> None:
    """Pods of some clusters have no other."""
    caplog.set_level("INFO")
    process, running = await started(FakeWorker(), advertise="fd00::7")
    await process.stop()
    assert f"at [fd00::7]:{running.ports[0]}" in caplog.text


@pytest.mark.parametrize("advertise", ["[fd00::7]", "node-1:50061"])
async def test_brackets_and_port_are_not_advertised(advertise: str) -> None:
    worker = FakeWorker()
    with pytest.raises(ConfigError, match="without brackets and port"):
        await started(worker, advertise=advertise)
    assert not worker.started


async def test_health_port_answers_probes_that_have_no_certificate(tmp_path: Path) -> None:
    make_certificates(tmp_path / "certs", (), days=1)
    ca, certificate, key = (tmp_path / "certs" / f"internal{each}.pem" for each in ("-ca", "", "-key"))
    worker, (main_port, health_port) = FakeWorker(), free_ports(2)
    tls = InternalTls(ca, certificate, key)
    worker.listener = Listener("127.0.0.1", main_port, lambda server: None, ("baton.Secret",), tls=tls)
    config = WorkerConfig(worker_id="w", model=Path("m"), health_port=health_port)
    serving = asyncio.create_task(serve(WorkerProcess(config, worker, FIRST), grace_s=1))
    async with asyncio.timeout(10):
        while await check_health(f"127.0.0.1:{health_port}") is not HealthOf.SERVING:
            await asyncio.sleep(0.01)
        assert await check_health(f"127.0.0.1:{main_port}", timeout_s=1) is HealthOf.UNREACHABLE, (
            "it needs a certificate"
        )
        worker.on_fault(RuntimeError("the test is over"))
        await serving
