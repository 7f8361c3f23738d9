"""A worker's runner, on one rank or several: loads it over the pool's memory, and has the worker end with any rank."""

import asyncio
from collections.abc import Callable, Sequence

from engine.lora.adapter_file import read_adapter
from engine.lora.adapters import AdapterSet
from engine.prepare import PreparedModel
from engine.runner import Runner
from service.adapter_folder import AdapterFolder
from worker.pool import PoolMemory


def load_runner(
    prepared: PreparedModel,
    memory: PoolMemory,
    adapters: Sequence[AdapterFolder],
    host_slots: int = 0,
    nice: int = 0,
    decode_rows: int = 0,
) -> Runner:
    """The model and its adapters, numbered from 1 in their order. Blocks. Raises: ModelError, RankLost.

    `host_slots`: blocks of host memory that plans may swap to. `nice`: how far the other ranks' processes stand back.
    `decode_rows`: sequences of a decode step at most, where such steps may be recorded.
    When it returns, no process can map the pool to write it any more.
    """
    loaded = prepared.adapters or (AdapterSet() if adapters else None)
    runner = prepared.load(
        memory.first_part,
        progress=False,
        adapters=loaded,
        host_slots=host_slots,
        ranks=memory.rank_options(nice),
        decode_rows=decode_rows,
    )
    memory.seal()
    if loaded is not None:
        for each in adapters:
            loaded.add(each.name, read_adapter(each.folder))
    return runner


def watch_ranks(runner: Runner, on_fault: Callable[[BaseException], None]) -> None:
    """`on_fault` is called on this event loop, at once, when another rank has ended: the worker cannot continue."""
    if runner.followers is not None:
        events = asyncio.get_running_loop()
        runner.followers.watch(lambda lost: _post(events, on_fault, lost))


def _post(events: asyncio.AbstractEventLoop, function: Callable[[BaseException], None], lost: BaseException) -> None:
    events.call_soon_threadsafe(function, lost)
