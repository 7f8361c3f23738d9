"""One worker process, two roles: drains the one and begins the other, over the same weights and the same pool.

Cached blocks stay in the pool. To routers the change is a new epoch of the same name: the session of the old one
ends when nothing is open in it, and the next one announces the new role.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, cast

import grpc

from baton.decode_worker.role import DecodeWorker, swap_slots
from baton.elastic_worker.config import ElasticConfig
from baton.engine.kv_cache.memory import LargestStep
from baton.engine.prepare import PreparedModel
from baton.prefill_worker.role import PrefillWorker
from baton.process.affinity import lower_priority
from baton.process.registry.membership import Epoch
from baton.process.registry.worker_record import WorkerRole
from baton.process.worker_process import end_on_error, take_worker_epoch
from baton.protos import session_pb2
from baton.worker.host import EngineHost
from baton.worker.process import PROMPTS_AT_ONCE, run_worker
from baton.worker.role import ServedWorker
from baton.worker.transfer.pool import TransferOptions

logger = logging.getLogger(__name__)
DRAIN_POLL_S = 0.02
ROLES = {session_pb2.ROLE_PREFILL: WorkerRole.PREFILL, session_pb2.ROLE_DECODE: WorkerRole.DECODE}


class ServicerSwitch(grpc.GenericRpcHandler):
    """Stands in a server as a handler, and for each role as the server that its servicers are added to.

    Calls that are under way stay with the servicer that they reached.
    """

    def __init__(self) -> None:
        self._handlers: tuple[grpc.GenericRpcHandler, ...] = ()

    def clear(self) -> None:
        """New calls are refused as unknown, which a router takes for a worker that is not there yet."""
        self._handlers = ()

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self._handlers += tuple(handlers)

    def add_registered_method_handlers(self, service_name: str, method_handlers: Any) -> None:
        """The generated code offers these as well; a server of grpc.aio does without them, and so does this one."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        for handler in self._handlers:
            found = handler.service(handler_call_details)
            if found is not None:
                return found
        return None


class ElasticWorker(ServedWorker):
    """A `service.worker_process.Worker`: owns the host and whichever worker serves over it now."""

    def __init__(
        self,
        config: ElasticConfig,
        prepared: PreparedModel,
        epoch: int,
        next_epoch: Callable[[], Awaitable[Epoch]],
    ) -> None:
        """`next_epoch` gives another one for each change."""
        super().__init__(config, prepared)
        self._config = config
        self._next_epoch = next_epoch
        self._servicer_switch = ServicerSwitch()
        rows = config.max_sequences if config.graphs else 0
        slots = swap_slots(config, prepared)
        self.host = EngineHost(config, prepared, TransferOptions.of(config), slots, config.nice, rows)
        self._on_fault: Callable[[BaseException], None] = lambda fault: None
        self._change: asyncio.Task[None] | None = None
        self._switching = False  # the old role has ended and the new one does not serve yet
        self._ending = False
        self._current = self._make(config.role, epoch)

    @property
    def role(self) -> WorkerRole:
        return self._current.role

    @property
    def busy(self) -> bool:
        return self._switching or self._current.busy

    @property
    def turns(self) -> int | None:
        return self._current.turns

    def register(self, server: grpc.aio.Server) -> None:
        server.add_generic_rpc_handlers((self._servicer_switch,))

    async def start(self, on_fault: Callable[[BaseException], None]) -> None:
        self._on_fault = on_fault
        await self._current.start(on_fault)

    def report(self) -> None:
        if not self._switching:
            self._current.report()

    def begin_drain(self) -> None:
        """The process ends: a change that is only waiting is called off, one that switches is waited for."""
        self._ending = True
        if not self._switching:
            if self._change is not None:
                self._change.cancel()
            self._current.begin_drain()

    async def stop(self) -> None:
        self._ending = True
        if self._change is not None:
            if not self._switching:
                self._change.cancel()
            await asyncio.gather(self._change, return_exceptions=True)
        await self._current.stop()
        await self.host.close()

    def change_role(self, wanted: "session_pb2.Role") -> None:
        """Begins a change; does nothing where it is that already, or one is under way."""
        role = ROLES.get(wanted)
        if role is None or role is self.role or self._ending or (self._change and not self._change.done()):
            return
        self._change = asyncio.create_task(self._change_to(role), name=f"change to {role}")
        end_on_error(self._change, self._on_fault)

    async def _change_to(self, role: WorkerRole) -> None:
        began_s = time.monotonic()
        old = self._current
        logger.info("%s drains to become %s", self._config.worker_id, role)
        old.drain.begin()
        try:
            async with asyncio.timeout(self._config.role_drain_s):
                while old.busy:  # noqa: ASYNC110 -- the table has no event
                    await asyncio.sleep(DRAIN_POLL_S)
                epoch = await self._next_epoch()
        except TimeoutError:
            logger.warning("it stays %s: requests were still open after %g s", old.role, self._config.role_drain_s)
            old.drain.call_off()
            return
        drained_s = time.monotonic()
        self._switching = True
        await old.stop()
        self.host.pass_on()
        self._current = self._make(role, epoch.number)
        await self._current.start(self._on_fault)
        self._switching = False
        self.on_role(epoch)
        if self._ending:
            self._current.begin_drain()
        now = time.monotonic()
        logger.info("serves as %s: drained in %.2f s, changed in %.2f s", role, drained_s - began_s, now - drained_s)

    def _make(self, role: WorkerRole, epoch: int) -> PrefillWorker | DecodeWorker:
        config, host = self._config, self.host
        lower_priority(config.nice if role is WorkerRole.PREFILL else 0)
        worker: PrefillWorker | DecodeWorker
        if role is WorkerRole.PREFILL:
            worker = PrefillWorker(config, self._prepared, epoch, host)
        else:
            worker = DecodeWorker(config, self._prepared, epoch, host=host)
        if self._prepared.config.makes_answers:
            worker.service.offer_roles(tuple(ROLES), self.change_role)
        self._servicer_switch.clear()
        worker.register(cast(grpc.aio.Server, self._servicer_switch))
        return worker


MakeElastic = Callable[[ElasticConfig, PreparedModel, int, Callable[[], Awaitable[Epoch]]], ElasticWorker]


def main(config: ElasticConfig, make_worker: MakeElastic = ElasticWorker) -> int:
    """Returns the exit code: 2 for an error that a restart would not fix."""
    sequences = config.max_sequences
    step = LargestStep(max(config.chunk_tokens, sequences), max(sequences, min(config.chunk_tokens, PROMPTS_AT_ONCE)))
    next_epoch = partial(take_worker_epoch, config)
    return run_worker(config, step, lambda prepared, epoch: make_worker(config, prepared, epoch, next_epoch))
