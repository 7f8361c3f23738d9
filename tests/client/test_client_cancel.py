"""Leaving an answer early ends the call on the server, whichever way one leaves."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import aclosing
from typing import Any

import grpc
import pytest

from baton.client import AsyncBatonClient, BatonClient, Cancelled, Started
from tests.client.conftest import Answer, Events, FakeBaton


@pytest.fixture
def endless(baton: FakeBaton, events: Events) -> FakeBaton:
    """Starts its answer and then says nothing until the call is over."""

    def answer(request: Any, context: grpc.ServicerContext) -> Any:
        yield events.started()
        baton.ended.wait(timeout=20)

    baton.answers = [answer]
    return baton


async def ended(baton: FakeBaton) -> bool:
    return await asyncio.to_thread(baton.ended.wait, 20)


def test_closing_the_generator_cancels(endless: FakeBaton) -> None:
    with BatonClient(endless.target) as client:
        events = client.generate("hi")
        assert isinstance(next(events), Started)
        assert not endless.ended.is_set()
        events.close()
        assert endless.ended.wait(timeout=20)


def test_closing_the_client_ends_its_readers(endless: FakeBaton) -> None:
    client = BatonClient(endless.target)
    events = client.generate("hi")
    next(events)
    closing = threading.Timer(0.05, client.close)
    closing.start()
    with pytest.raises(Cancelled):
        next(events)
    closing.join()


def test_ctrl_c_with_a_held_lock_does_not_hang_the_next_call(
    endless: FakeBaton, hello: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python may raise KeyboardInterrupt when `Condition.__enter__` has taken the lock and `with` has not begun."""
    endless.answers.append(hello)
    enter = threading.Condition.__enter__
    main = threading.current_thread()
    interrupts = iter([True])

    def interrupted(condition: threading.Condition) -> bool:
        is_entered = enter(condition)
        if threading.current_thread() is main and next(interrupts, False):
            raise KeyboardInterrupt
        return is_entered

    client = BatonClient(endless.target, timeout_s=10)
    events = client.generate("hi")
    next(events)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Condition, "__enter__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(events)
    assert next(interrupts, None) is None
    answer = Future[str]()
    reader = threading.Thread(target=lambda: answer.set_result(client.complete("hi").text), daemon=True)
    reader.start()  # of its own: a call that hangs cannot be ended
    assert answer.result(timeout=10) == "hello"
    client.close()


async def test_leaving_the_loop_under_aclosing_cancels(endless: FakeBaton) -> None:
    async with AsyncBatonClient(endless.target) as client:
        async with aclosing(client.generate("hi")) as events:
            async for _ in events:
                break
        assert await ended(endless)


async def test_cancelling_the_reading_task_cancels(endless: FakeBaton) -> None:
    async with AsyncBatonClient(endless.target) as client:
        began = asyncio.Event()
        reader = asyncio.create_task(read(client, began.set))
        await asyncio.wait_for(began.wait(), timeout=10)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert await ended(endless)


async def test_timeout_around_the_reader_stays_a_timeout(endless: FakeBaton) -> None:
    async with AsyncBatonClient(endless.target) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10) as bound:
                await read(client, lambda: bound.reschedule(asyncio.get_running_loop().time()))
        assert await ended(endless)


async def test_closing_the_async_client_ends_its_readers(endless: FakeBaton) -> None:
    client = AsyncBatonClient(endless.target)
    began = asyncio.Event()
    reader = asyncio.create_task(read(client, began.set))
    await asyncio.wait_for(began.wait(), timeout=10)
    await client.close()
    with pytest.raises(Cancelled):
        await asyncio.wait_for(reader, timeout=20)


async def read(client: AsyncBatonClient, on_event: Callable[[], None]) -> None:
    async for _ in client.generate("hi"):
        on_event()
