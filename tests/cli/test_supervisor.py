"""Supervisor: restarts and ordered stops, with scripted children and an injected clock."""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import pytest

from baton.launch.processes import Backoff, ProcessSpec, Stage
from baton.launch.supervisor import ServiceFailed, Supervisor
from baton.process.serving.exit_codes import ExitCode
from tests.fixtures.waiting import BOUND_S, eventually


class FakeChild:
    """Ends when told to; on SIGTERM by itself unless it is stubborn."""

    def __init__(self, spec: ProcessSpec, journal: list[str], stubborn: bool) -> None:
        self.pid = 1
        self.tail = (f"{spec.name:<9} | the last line",)
        self._spec = spec
        self._journal = journal
        self._stubborn = stubborn
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        return await self._ended

    def end(self, code: int) -> None:
        if not self._ended.done():
            self._ended.set_result(code)

    def send(self, number: signal.Signals) -> None:
        self._journal.append(f"{self._spec.name} {number.name}")
        if number is signal.SIGKILL or not self._stubborn:
            self.end(-number)


class World:
    """The world around a supervisor: children by name, a journal, what was said, a clock."""

    def __init__(self) -> None:
        self.children: dict[str, FakeChild] = {}
        self.starts: list[str] = []
        self.journal: list[str] = []
        self.said: list[str] = []
        self.stubborn: set[str] = set()
        self.now = 0.0

    async def start_child(self, spec: ProcessSpec) -> FakeChild:
        self.starts.append(spec.name)
        self.children[spec.name] = FakeChild(spec, self.journal, spec.name in self.stubborn)
        return self.children[spec.name]

    def supervise(
        self, *specs: ProcessSpec, ready: bool = True, backoff: Callable[[], Backoff] = Backoff
    ) -> Supervisor:
        """Start a supervisor, which has been ready before unless `ready` is false."""
        supervisor = Supervisor(specs, self.start_child, self.said.append, lambda: self.now, backoff)  # type: ignore[arg-type]
        supervisor.start()
        if ready:
            supervisor.mark_ready()
        return supervisor

    async def failure(self, supervisor: Supervisor, message: str) -> ServiceFailed:
        """Return the failure of a supervisor, then stop it."""
        async with asyncio.timeout(BOUND_S):
            with pytest.raises(ServiceFailed, match=message) as failed:
                await supervisor.failure
        await supervisor.stop()
        return failed.value


def spec(name: str, stage: Stage, grace_s: float = 5.0) -> ProcessSpec:
    return ProcessSpec(name, ("never-run",), stage, grace_s, {})


@pytest.fixture
async def world() -> AsyncIterator[World]:
    yield World()


REDIS, WORKER, ROUTER = spec("redis", Stage.REDIS), spec("decode-0", Stage.WORKER), spec("router", Stage.ROUTER)


async def test_supervisor_dead_worker_is_restarted(world: World) -> None:
    supervisor = world.supervise(WORKER)
    await eventually(lambda: world.starts == ["decode-0"])
    world.children["decode-0"].end(-signal.SIGKILL)
    await eventually(lambda: world.starts == ["decode-0", "decode-0"])
    assert world.said == ["decode-0 was ended by SIGKILL; restarting it in 0.2 s"]
    await supervisor.stop()


async def test_supervisor_delay_grows_until_a_long_life(world: World) -> None:
    supervisor = world.supervise(WORKER)
    for number, lived_s in enumerate((0.0, 0.0, 31.0), start=1):
        await eventually(lambda number=number: len(world.starts) == number)  # type: ignore[misc]
        world.now += lived_s
        world.children["decode-0"].end(1)
    await eventually(lambda: len(world.said) == 3)
    assert [line.rpartition(" in ")[2] for line in world.said] == ["0.2 s", "0.4 s", "0.2 s"]
    await supervisor.stop()


async def test_supervisor_stops_router_workers_redis_in_order(world: World) -> None:
    other = spec("prefill-0", Stage.WORKER)
    supervisor = world.supervise(REDIS, WORKER, other, ROUTER, ready=False)
    await eventually(lambda: len(world.starts) == 4)
    await supervisor.stop()
    assert world.journal == ["router SIGTERM", "decode-0 SIGTERM", "prefill-0 SIGTERM", "redis SIGTERM"]
    assert len(world.starts) == 4


async def test_supervisor_stop_waits_for_router_drain(world: World) -> None:
    world.stubborn = {"router"}
    supervisor = world.supervise(WORKER, ROUTER, ready=False)
    await eventually(lambda: len(world.starts) == 2)
    stopping = asyncio.create_task(supervisor.stop())
    await eventually(lambda: world.journal == ["router SIGTERM"])
    world.children["router"].end(0)
    await stopping
    assert world.journal == ["router SIGTERM", "decode-0 SIGTERM"]


async def test_supervisor_stop_kills_after_grace(world: World) -> None:
    world.stubborn = {"decode-0"}
    supervisor = world.supervise(spec("decode-0", Stage.WORKER, grace_s=0.01), ready=False)
    await eventually(lambda: len(world.starts) == 1)
    await supervisor.stop()
    assert world.journal == ["decode-0 SIGTERM", "decode-0 SIGKILL"]


async def test_supervisor_force_ends_waiting_stop(world: World) -> None:
    world.stubborn = {"router", "decode-0"}
    supervisor = world.supervise(WORKER, ROUTER, ready=False)
    await eventually(lambda: len(world.starts) == 2)
    stopping = asyncio.create_task(supervisor.stop())
    await eventually(lambda: world.journal == ["router SIGTERM"])
    supervisor.force()
    async with asyncio.timeout(10):
        await stopping
    assert {"router SIGKILL", "decode-0 SIGKILL"} <= set(world.journal)


async def test_supervisor_stop_interrupts_restart_delay(world: World) -> None:
    supervisor = world.supervise(WORKER, backoff=partial(Backoff, first_s=60.0, longest_s=60.0))
    await eventually(lambda: len(world.starts) == 1)
    world.children["decode-0"].end(1)
    await eventually(lambda: len(world.said) == 1)
    async with asyncio.timeout(10):
        await supervisor.stop()
    assert len(world.starts) == 1


async def test_supervisor_stop_signals_child_that_is_starting(world: World) -> None:
    gate = asyncio.Event()

    async def slow_start(child_spec: ProcessSpec) -> FakeChild:
        await gate.wait()
        return await world.start_child(child_spec)

    start: Callable[[ProcessSpec], Awaitable[FakeChild]] = slow_start
    supervisor = Supervisor([WORKER], start, world.said.append, clock=lambda: 0.0)  # type: ignore[arg-type]
    supervisor.start()
    await asyncio.sleep(0)
    stopping = asyncio.create_task(supervisor.stop())
    await asyncio.sleep(0)
    gate.set()
    async with asyncio.timeout(10):
        await stopping
    assert world.journal == ["decode-0 SIGTERM"]


async def test_supervisor_three_early_deaths_fail(world: World) -> None:
    supervisor = world.supervise(WORKER, ready=False)
    for number in range(1, 4):
        await eventually(lambda number=number: len(world.starts) == number)  # type: ignore[misc]
        world.children["decode-0"].end(1)
    await world.failure(supervisor, "decode-0 ended with exit code 1")


async def test_supervisor_final_exit_code_before_ready_fails(world: World) -> None:
    supervisor = world.supervise(WORKER, ready=False)
    await eventually(lambda: len(world.starts) == 1)
    world.children["decode-0"].end(2)
    await world.failure(supervisor, "exit code 2")
    assert world.starts == ["decode-0"]


@pytest.mark.parametrize("code", [ExitCode.WRONG_CONFIGURATION, ExitCode.CANNOT_LISTEN])
async def test_supervisor_ready_and_final_exit_code_fails_without_restart(world: World, code: int) -> None:
    supervisor = world.supervise(ROUTER)
    await eventually(lambda: world.starts == ["router"])
    world.children["router"].end(code)
    failure = await world.failure(supervisor, rf"router ended with exit code {code}: it.* not restarting it")
    assert world.starts == ["router"] and failure.tail == ("router    | the last line",)


async def test_supervisor_crash_loop_ends_after_ten_deaths_in_a_row(world: World) -> None:
    supervisor = world.supervise(WORKER, backoff=partial(Backoff, first_s=0.0))
    for number in range(1, 11):
        await eventually(lambda number=number: len(world.starts) == number)  # type: ignore[misc]
        world.children["decode-0"].end(-signal.SIGKILL)
    await world.failure(supervisor, "decode-0 was ended by SIGKILL, 10 times in a row")
    assert len(world.starts) == 10 and len(world.said) == 9


async def test_supervisor_gives_up_one_of_two_workers_and_serves_on(world: World) -> None:
    other = spec("decode-1", Stage.WORKER)
    supervisor = world.supervise(WORKER, other)
    await eventually(lambda: len(world.starts) == 2)
    world.children["decode-0"].end(ExitCode.WRONG_CONFIGURATION)
    await eventually(lambda: len(world.said) == 1)
    assert "not restarting it" in world.said[0] and not supervisor.failure.done()
    world.children["decode-1"].end(ExitCode.WRONG_CONFIGURATION)
    await world.failure(supervisor, "decode-1")
