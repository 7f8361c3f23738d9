"""Whose turn it is at costly work: callers share, whatever one of them brings."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from baton.router.model.turns import Turns


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Work:
    """One piece of work, from its turn until it is told to end."""

    def __init__(self, turns: Turns, tenant: str, cost: int = 1) -> None:
        self.begun, self._end = False, asyncio.Event()
        self._task = asyncio.ensure_future(self._run(turns, tenant, cost))

    async def _run(self, turns: Turns, tenant: str, cost: int) -> None:
        async with turns.turn(tenant, cost):
            self.begun = True
            await self._end.wait()

    async def end(self) -> None:
        self._end.set()
        await self._task

    async def cancel(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def test_turns_with_two_slots_leave_one_for_another_caller() -> None:
    turns = Turns(2)
    many = [Work(turns, "many") for _ in range(5)]
    await settled()
    assert [each.begun for each in many] == [True, False, False, False, False]
    other = Work(turns, "other")
    await settled()
    assert other.begun
    for work in (other, *many):
        await work.end()


async def test_turns_alternate_between_callers_by_cost() -> None:
    turns = Turns(1)
    first = Work(turns, "first")
    await settled()
    costly = [Work(turns, "costly", 10) for _ in range(2)]
    cheap = [Work(turns, "cheap", 1) for _ in range(5)]
    order = list[str]()
    await first.end()
    waiting = {**dict.fromkeys(costly, "costly"), **dict.fromkeys(cheap, "cheap")}
    while waiting:
        await settled()
        [begun] = [each for each in waiting if each.begun]
        order.append(waiting.pop(begun))
        await begun.end()
    assert order == ["costly", *["cheap"] * 5, "costly"]


async def test_turns_of_requests_without_a_name_are_their_own() -> None:
    turns = Turns(2)
    works = [Work(turns, "") for _ in range(2)]
    await settled()
    assert all(each.begun for each in works)
    for work in works:
        await work.end()


@pytest.mark.parametrize("begun", [False, True])
async def test_cancelled_turn_passes_to_the_next_caller(begun: bool) -> None:
    turns = Turns(1)
    async with AsyncExitStack() as slot:
        if not begun:
            await slot.enter_async_context(turns.turn("holder", 1))
        cancelled, following = Work(turns, "a"), Work(turns, "b")
        await settled()
        assert cancelled.begun is begun and not following.begun
        await cancelled.cancel()
    await settled()
    assert following.begun
    await following.end()
