"""Several requests answered at once, as one: their events together, or each one whole."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

from gateway.collected import Collected, collect
from router.outcomes import Leave, Reader
from router.request import GenerationRequest
from router.response import ResponseEvent

_AHEAD = 64  # events that wait for a client; more of them wait in the router, which has a bound of its own

Answer = Callable[[GenerationRequest], AsyncGenerator[ResponseEvent, None]]


class Numbered(NamedTuple):
    """An event of the `place`-th request."""

    place: int
    event: ResponseEvent


async def collect_all(requests: Sequence[GenerationRequest], answer: Answer, reader: Reader) -> list[Collected]:
    """In the order of the requests; the first failure ends the others. Raises: BatonError."""
    tasks = [asyncio.ensure_future(collect(answer(request))) for request in requests]
    try:
        return list(await asyncio.gather(*tasks))
    except Exception:
        reader.leaves = Leave.SIBLING
        raise
    finally:
        await _end(tasks)


async def merged(
    requests: Sequence[GenerationRequest], answer: Answer, reader: Reader
) -> AsyncGenerator[Numbered, None]:
    """Events as they come; the first failure ends the others. Raises: BatonError."""
    if len(requests) == 1:  # nearly always, and without a task and a queue in between
        async with aclosing(answer(requests[0])) as events:
            async for event in events:
                yield Numbered(0, event)
        return
    queue: asyncio.Queue[Numbered | Exception | None] = asyncio.Queue(_AHEAD)

    async def follow(place: int, request: GenerationRequest) -> None:
        try:
            async with aclosing(answer(request)) as events:
                async for event in events:
                    await queue.put(Numbered(place, event))
        except Exception as error:  # noqa: BLE001 (the reader of the queue raises it)
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.ensure_future(follow(place, request)) for place, request in enumerate(requests)]
    try:
        running = len(tasks)
        while running:
            match await queue.get():
                case Numbered() as numbered:
                    yield numbered
                case None:
                    running -= 1
                case Exception() as error:
                    reader.leaves = Leave.SIBLING
                    raise error
    finally:
        await _end(tasks)


async def _end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
