"""Calls of blocking work on threads."""

import asyncio
import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from baton.router.http.edge.problem import retry_later

Given = ParamSpec("Given")
Result = TypeVar("Result")

logger = logging.getLogger(__name__)


async def completed(work: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs) -> Result:
    """Run `work` on a thread until it has completed, even if this call is cancelled."""
    working = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        raise


async def on_disk(work: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs) -> Result:
    """Run work for a client on a thread. Raises: its problems, and Problem (503) if the disk fails."""
    try:
        return await completed(work, *args, **kwargs)
    except OSError as error:
        logger.warning("folder of batches failed: %s; the client gets status 503", error)
        raise retry_later("the folder of files and batches is not usable", "batches_unavailable") from error
