"""List of everything that the simulation replaces; all other code is production code.

Clock, randomness, gRPC channels and servers, threads, shared memory, Redis, tokenizer files, drafts, disk and threads
of KV files, and garbage collection at process start. `processes.py` passes workers a simulated host.
"""

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import grpc

import baton.decode_worker.role
import baton.engine.runner.loop
import baton.kvtransfer.tier.loader
import baton.process.serving.server
import baton.router.process
import baton.router.readiness
import baton.worker.process
import baton.worker.tier.restorer
import baton.worker.tier.tier
import baton.worker.transfer.peers
import baton.worker.transfer.reader
import baton.worker.transfer.source
from baton.engine.scheduler.drafts import Drafter
from baton.engine.scheduler.speculation import Speculation
from baton.kvtransfer.checksum import SampledChecksums
from baton.lab.simulation.files.disk import SimulatedDisk
from baton.lab.simulation.files.tier import InlineExecutor, SimulatedExecutor, SimulatedTierWriter
from baton.lab.simulation.host import (
    SharedMemories,
    SimulatedEngineThread,
    SimulatedLag,
    SimulatedLink,
    SimulatedMeter,
    SimulatedQueue,
    SimulatedWatchdog,
    served_model,
)
from baton.lab.simulation.network.calls import Internet
from baton.lab.simulation.network.loop import SimulatedLoop
from baton.lab.simulation.redis import SimulatedRedis

WALL_CLOCK_NS = 1_700_000_000_000_000_000
CONFIRM_PERIOD_S = 0.004
"""Period at which readers confirm blocks, shorter than in production: simulated prompts are short, and so are pulls."""

StandIn = tuple[Any, str, Any]
"""Object, name of its attribute, and the attribute's replacement."""


@contextmanager
def installed(
    loop: SimulatedLoop,
    internet: Internet,
    memories: SharedMemories,
    redis: SimulatedRedis,
    disk: SimulatedDisk,
    disk_draw: random.Random,
    draw: random.Random,
    drafter: Drafter,
    on_stall: Callable[[str, float], None],
    confirm_period_s: float = CONFIRM_PERIOD_S,
) -> Iterator[None]:
    """Replace clock, network, disk and Redis of this process inside the block. `on_stall`: ends a stalled process."""
    state = random.getstate()
    random.seed(draw.random())

    def watchdog(bound_s: float) -> SimulatedWatchdog:
        return SimulatedWatchdog(bound_s, on_stall)

    def speculation(most_tokens: int, target_s: float | None, _: Drafter | None, alike: bool) -> Speculation:
        return Speculation(most_tokens, target_s, drafter, alike)

    replaced: list[StandIn] = [
        *_of_time_and_chance(loop, draw),
        (grpc.aio, "insecure_channel", internet.channel),
        (grpc.aio, "server", internet.server),
        (asyncio, "open_connection", internet.connect),
        (baton.engine.runner.loop, "EngineThread", SimulatedEngineThread),
        (baton.engine.runner.loop, "ThreadMeter", SimulatedMeter),
        (baton.engine.runner.loop, "ProcessQueue", SimulatedQueue),
        (baton.worker.transfer.peers, "open_peer", memories.open),
        (baton.worker.transfer.peers, "GrpcLink", SimulatedLink),
        (baton.worker.transfer.reader, "CONFIRM_PERIOD_S", confirm_period_s),
        (
            baton.worker.transfer.source,
            "SampledChecksums",
            partial(SampledChecksums, draws=random.Random(draw.random())),
        ),
        (baton.decode_worker.role, "Speculation", speculation),
        *_of_files(loop, disk, disk_draw),
        (baton.router.process, "_open_stores", redis.stores),
        (baton.router.process, "LoopLag", SimulatedLag),
        (baton.router.process, "open_registry", redis.registry),
        (baton.worker.process, "open_registry", redis.registry),
        (baton.router.readiness, "load_served_model", served_model),
        (baton.process.serving.server, "Watchdog", watchdog),
        (baton.process.serving.server, "keep_for_good", lambda: None),
        (baton.process.serving.server, "check_free", lambda address, shared=False: None),
    ]
    with ExitStack() as undo:
        for owner, name, stand_in in replaced:
            undo.enter_context(patch.object(owner, name, stand_in))
        try:
            yield
        finally:
            random.setstate(state)


def _of_time_and_chance(loop: SimulatedLoop, draw: random.Random) -> list[StandIn]:
    return [
        (time, "monotonic", loop.time),
        (time, "thread_time", loop.time),
        (time, "time_ns", lambda: WALL_CLOCK_NS + round(loop.time() * 1e9)),
        (secrets, "token_bytes", lambda size=32: draw.randbytes(size)),
        (secrets, "token_hex", lambda size=32: draw.randbytes(size).hex()),
        (secrets, "randbits", draw.getrandbits),
    ]


def _of_files(loop: SimulatedLoop, disk: SimulatedDisk, draw: random.Random) -> list[StandIn]:
    return [
        (baton.worker.tier.tier, "TierWriter", partial(SimulatedTierWriter, draw, loop.time)),
        (baton.worker.tier.restorer, "ThreadPoolExecutor", partial(SimulatedExecutor, draw, disk)),
        (baton.kvtransfer.tier.loader, "ThreadPoolExecutor", InlineExecutor),
    ]
