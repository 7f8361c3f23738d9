"""The simulation's event loop: virtual time, and processes that die, hang and continue."""

import asyncio
import random
from collections.abc import Iterator

import pytest

from baton.lab.simulation.network.loop import OutOfTurns, SimulatedLoop, SimulatedProcess, spawn


@pytest.fixture
def loop() -> Iterator[SimulatedLoop]:
    made = SimulatedLoop(random.Random(1))
    yield made
    made.forget()
    made.close()


def test_hour_takes_no_real_time(loop: SimulatedLoop) -> None:
    began_s = loop.time()
    loop.run_until_complete(asyncio.sleep(3600))
    assert loop.time() == began_s + 3600


def test_callbacks_of_a_process_keep_their_order_and_processes_take_turns(loop: SimulatedLoop) -> None:
    done: list[str] = []
    for name in ("a", "b"):
        process = SimulatedProcess(name)
        for number in range(20):
            loop.call_soon(done.append, f"{name}{number}", context=process.context)
    loop.run_until_complete(asyncio.sleep(1))
    assert [each for each in done if each[0] == "a"] == [f"a{number}" for number in range(20)]
    assert done != sorted(done, key=lambda each: each[0])


def test_killed_process_does_nothing_any_more_not_even_on_its_way_out(loop: SimulatedLoop) -> None:
    done: list[str] = []

    async def life() -> None:
        try:
            while True:
                await asyncio.sleep(1)
                done.append("lives")
        finally:
            done.append("cleans up")

    async def scenario() -> None:
        process = SimulatedProcess("victim")
        spawn(loop, process, life(), "life")
        await asyncio.sleep(2.5)
        loop.kill(process)
        await asyncio.sleep(10)

    loop.run_until_complete(scenario())
    assert done == ["lives", "lives"]


def test_stopped_process_continues_at_its_position(loop: SimulatedLoop) -> None:
    ticks: list[float] = []

    async def life() -> None:
        while True:
            await asyncio.sleep(1)
            ticks.append(loop.time() - 1000.0)

    async def scenario() -> None:
        process = SimulatedProcess("sleeper")
        spawn(loop, process, life(), "life")
        await asyncio.sleep(1.5)
        loop.hang(process)
        await asyncio.sleep(5)
        assert ticks == [1.0]
        loop.go_on(process)
        await asyncio.sleep(2)

    loop.run_until_complete(scenario())
    assert ticks == [1.0, 6.5, 7.5]


def test_waiting_for_nothing_is_an_error(loop: SimulatedLoop) -> None:
    with pytest.raises(OutOfTurns):
        loop.run_until_complete(asyncio.Event().wait())


def test_turning_in_circles_is_an_error(loop: SimulatedLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.lab.simulation.network.loop.MOST_CALLBACKS_AT_ONCE", 100)

    async def circles() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(OutOfTurns):
        loop.run_until_complete(circles())
