"""Process of many simulated workers, which compute nothing. Each has its own port, links, cache and registration.

`-m baton.lab.benchmarks.scale.worker FOLDER REDIS_URL FIRST COUNT PREFILL_EVERY BLOCKS`: workers with the numbers FIRST
to FIRST + COUNT - 1. Every PREFILL_EVERY-th is a prefill worker, the others are decode workers. Each begins with BLOCKS
cached blocks, and caches the blocks of every prompt that it gets.
"""

import asyncio
import os
import random
import sys
import time
from collections.abc import Sequence
from itertools import count
from typing import Any

import grpc

from baton.engine.kv_cache.block_pool import CacheChanges
from baton.lab.benchmarks.router.worker import ZeroWorker
from baton.process.registry.membership import Epoch, take_epoch
from baton.process.registry.redis_registry import RedisRegistry, RegistryUnavailable
from baton.process.registry.worker_record import WorkerRecord, WorkerRole
from baton.process.serving.grpc_options import INTERNAL_SERVER_OPTIONS
from baton.process.serving.server import run
from baton.protos import report_pb2, session_pb2, session_pb2_grpc
from baton.text.block_hash import HASH_BYTES
from baton.versions import OWN
from baton.worker.cache_events import CacheEventPublisher
from baton.worker.config import REPORT_PERIOD_S

HOST, NAMESPACE = "127.0.0.1", "scale"
STEP_S = 0.02
RENEW_S, TTL_MS = 4.0, 12_000  # longer than those of real workers, which do not share a core with thousands of others
IDLE_REPORTS = 3  # report periods between the reports of an idle worker, which `send_report` would drop
ROLES = {WorkerRole.PREFILL: session_pb2.ROLE_PREFILL, WorkerRole.DECODE: session_pb2.ROLE_DECODE}


def role_of(number: int, prefill_every: int) -> WorkerRole:
    return WorkerRole.DECODE if number % prefill_every else WorkerRole.PREFILL


class CachingWorker(ZeroWorker):
    """Worker that computes nothing and reports a prefix cache."""

    def __init__(self, role: WorkerRole, folder: str, number: int, epoch: int, blocks: int) -> None:
        super().__init__(ROLES[role], folder, f"{role}-{number}", epoch)
        self._cache = CacheEventPublisher(self._hub, epoch)
        draw = random.Random(f"{os.getpid()}/{number}").randbytes
        self._cache.on_changes(CacheChanges(tuple(draw(HASH_BYTES) for _ in range(blocks)), ()))
        self._steps = 0

    @property
    def is_busy(self) -> bool:
        return any(self._running.values())

    def step(self) -> None:
        if self.is_busy:
            self._steps += 1
            super().step()

    def _report(self) -> report_pb2.Report:
        report = super()._report()
        report.steps, report.running_sequences = self._steps, sum(map(len, self._running.values()))
        report.cache.CopyFrom(self._cache.sum)
        return report

    def _on_command(self, session: Any, command: session_pb2.ConnectRequest) -> None:
        match command.WhichOneof("command"):
            case "snapshot_request":
                self._cache.send_snapshot(session)
            case "prefill" | "start" as kind:
                hashes = getattr(command, kind).block_hashes
                new = tuple(each for each in hashes if not self._cache.knows(each))
                self._cache.on_changes(CacheChanges(new, ()))
        super()._on_command(session, command)


async def serve(worker: CachingWorker) -> str:
    """Serve a worker at any free port, and return its endpoint."""
    server = grpc.aio.server(options=INTERNAL_SERVER_OPTIONS)
    session_pb2_grpc.add_SessionServiceServicer_to_server(worker, server)
    port = server.add_insecure_port(f"{HOST}:0")
    await server.start()
    _SERVERS.append(server)
    return f"{HOST}:{port}"


_SERVERS: list[grpc.aio.Server] = []  # a server without references is stopped


async def announce(registry: RedisRegistry, records: Sequence[WorkerRecord]) -> None:
    """Renew the records of all workers until cancelled."""
    while True:
        began_s = time.monotonic()
        for record in records:
            try:
                await registry.announce(record, TTL_MS)
            except RegistryUnavailable as error:
                print(f"{record.worker_id} is not announced: {error}", file=sys.stderr, flush=True)
        await asyncio.sleep(max(0.0, began_s + RENEW_S - time.monotonic()))


async def serve_all(folder: str, redis_url: str, numbers: Sequence[int], prefill_every: int, blocks: int) -> int:
    """Serve the workers until killed."""
    registry = RedisRegistry(redis_url, NAMESPACE)
    epoch: Epoch = await take_epoch(registry)
    workers, records = [], []
    for number in numbers:
        role = role_of(number, prefill_every)
        worker = CachingWorker(role, folder, number, epoch.number, blocks)
        endpoint = await serve(worker)
        workers.append(worker)
        records.append(
            WorkerRecord(
                worker.info.worker_id, role, endpoint, epoch.number, worker.info.fingerprint.hex(),
                OWN.release, OWN.protocol, OWN.oldest_protocol,
            )
        )  # fmt: skip
    announcing = asyncio.create_task(announce(registry, records))
    period = round(REPORT_PERIOD_S / STEP_S)  # number of steps between reports, which differ between workers
    due_s = time.monotonic()
    for step in count():
        for worker in workers:
            worker.step()
        for worker in workers[step % period :: period]:
            if worker.is_busy or step // period % IDLE_REPORTS == 0:
                worker.report()
        due_s = max(due_s + STEP_S, time.monotonic())
        await asyncio.wait([announcing], timeout=due_s - time.monotonic())
        if announcing.done():
            announcing.result()
    return 0


if __name__ == "__main__":
    first, size, every, cached = map(int, sys.argv[3:7])
    sys.exit(run(serve_all(sys.argv[1], sys.argv[2], range(first, first + size), every, cached)))
