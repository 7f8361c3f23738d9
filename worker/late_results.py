"""Results of other threads for tasks that may be cancelled: a result that arrives after the cancellation is
released.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")
Asked = Future[Result] | asyncio.Future[Result]


async def result_or_release(asked: Asked[Result], release: Callable[[Result], None]) -> Result:
    """Return the result of `asked`, or raise its exception. If the caller is cancelled, `release` receives the late
    result.

    `release` runs on the thread that sets the result.
    """
    try:
        return await (asyncio.shield(asked) if isinstance(asked, asyncio.Future) else asyncio.wrap_future(asked))
    except asyncio.CancelledError:
        release_when_done(asked, release)
        raise


def release_when_done(asked: Asked[Result], release: Callable[[Result], None]) -> None:
    """Pass the result of `asked` to `release` when it completes; do nothing if it fails or is cancelled."""

    def on_done(done: Asked[Result]) -> None:
        if not done.cancelled() and done.exception() is None:
            release(done.result())

    asked.add_done_callback(on_done)


async def run_on_thread(make: Callable[[], Result], release: Callable[[Result], None]) -> Result:
    """Run `make` on a thread; return its result or raise its exception. If the caller is cancelled, `release` receives
    the late result.
    """
    return await result_or_release(asyncio.ensure_future(asyncio.to_thread(make)), release)
