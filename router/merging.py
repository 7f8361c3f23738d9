"""Several streams of events as one, in the order of their coming."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

Item = TypeVar("Item")


async def merged(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    """Until all have ended. The first error of one ends all of them, as does closing this.

    A reader that is slow holds them up: of each, one item at most waits here.
    """
    awaited = {asyncio.create_task(_next(stream)): stream for stream in streams}
    try:
        while awaited:
            come, _ = await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            for task in come:
                stream = awaited.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                awaited[asyncio.create_task(_next(stream))] = stream
                yield item
    finally:
        for task in awaited:
            task.cancel()
        await asyncio.gather(*awaited, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _next(stream: AsyncGenerator[Item, None]) -> Item:
    return await anext(stream)
