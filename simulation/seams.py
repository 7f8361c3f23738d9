"""The simulated surroundings of our code: the one list. All other code is the same as in production.

Clock, randomness, gRPC's channels and servers, threads, shared memory, Redis, the tokenizer's files, and the collection
of garbage at the start of a process. (And the host that `processes.py` gives a worker in place of checkpoint and pool.)
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

import engine.engine_loop
import prefill_worker.loop
import prefill_worker.worker
import router.process
import router.readiness
import service.server
import service.worker_process
import worker.peers
import worker.transfer_reader
import worker.transfer_source
from kvtransfer.checksum import SampledChecksums
from prefill_worker.pace import Pace
from router.admission import AdmissionQueue
from router.explaining import Explainer
from router.journal import Journal
from router.replicas import Replicas
from simulation.calls import Internet
from simulation.copying import SharedMemories, SimulatedLink, SimulatedPullThread
from simulation.engine_thread import SimulatedEngineThread
from simulation.journal import SimulatedJournal
from simulation.loop import SimulatedLoop
from simulation.redis import SimulatedRedis
from simulation.text import served_model
from simulation.watchdog import SimulatedWatchdog

WALL_CLOCK_NS = 1_700_000_000_000_000_000
CONFIRM_PERIOD_S = 0.004
"""Prompts are short here: with the usual one hardly any would be pulled for so long."""


@contextmanager
def installed(
    loop: SimulatedLoop,
    internet: Internet,
    memories: SharedMemories,
    redis: SimulatedRedis,
    draw: random.Random,
    copy_s: float,
    on_stall: Callable[[str, float], None],
) -> Iterator[None]:
    """Within, this process has no other clock and no other world. `on_stall` ends a process that stands still."""
    state = random.getstate()
    random.seed(draw.random())

    def watchdog(bound_s: float) -> SimulatedWatchdog:
        return SimulatedWatchdog(bound_s, on_stall)

    replaced: list[tuple[Any, str, Any]] = [
        (time, "monotonic", loop.time),
        (time, "time_ns", lambda: WALL_CLOCK_NS + round(loop.time() * 1e9)),
        (secrets, "token_bytes", lambda size=32: draw.randbytes(size)),
        (secrets, "token_hex", lambda size=32: draw.randbytes(size).hex()),
        (secrets, "randbits", draw.getrandbits),
        (grpc.aio, "insecure_channel", internet.channel),
        (grpc.aio, "server", internet.server),
        (asyncio, "open_connection", internet.connect),
        (engine.engine_loop, "EngineThread", SimulatedEngineThread),
        (worker.peers, "open_peer", memories.open),
        (worker.peers, "GrpcLink", SimulatedLink),
        (worker.transfer_reader, "CONFIRM_PERIOD_S", CONFIRM_PERIOD_S),
        (worker.transfer_source, "SampledChecksums", partial(SampledChecksums, draws=random.Random(draw.random()))),
        (prefill_worker.worker, "PullThread", lambda cores: SimulatedPullThread(draw, copy_s)),
        (router.process, "_journal_store", lambda config, router_id: SimulatedJournal(redis, router_id)),
        (router.process, "_shares", redis.shares),
        (router.process, "open_registry", redis.registry),
        (service.worker_process, "open_registry", redis.registry),
        (router.process, "Replicas", partial(Replicas, clock=loop.time)),
        (router.process, "Journal", partial(Journal, clock=loop.time)),
        (router.process, "AdmissionQueue", partial(AdmissionQueue, clock=loop.time)),
        (router.process, "Explainer", partial(Explainer, clock=loop.time)),
        (prefill_worker.loop, "Pace", partial(Pace, now=loop.time)),
        (router.readiness, "load_served_model", served_model),
        (service.server, "Watchdog", watchdog),
        (service.server, "_keep_for_good", lambda: None),
    ]
    with ExitStack() as undo:
        for owner, name, stand_in in replaced:
            undo.enter_context(patch.object(owner, name, stand_in))
        try:
            yield
        finally:
            random.setstate(state)
