"""Where the two ranks of a process group meet, off the event loop."""

import asyncio

from kvtransfer.group_store import GroupStore, KeyValues
from kvtransfer.process_group import GroupOptions, ProcessGroup


async def meet(values: KeyValues, rank: int, options: GroupOptions) -> ProcessGroup:
    """Bounded by the group's timeout. When cancelled, a group that comes about all the same is dropped.

    Raises: LinkBroken.
    """
    store = GroupStore(values, options.timeout_s)
    opening = asyncio.ensure_future(asyncio.to_thread(ProcessGroup, store, rank, options))
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_drop)
        raise


def _drop(opening: "asyncio.Future[ProcessGroup]") -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
