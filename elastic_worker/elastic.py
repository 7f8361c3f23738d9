"""Worker process that changes its role: it drains one role and starts the other with the same weights and pool.

Cached blocks stay in the pool. Routers see a new epoch of the same worker: the link of the old epoch closes after its
last request, and the next link announces the new role.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial

from baton.decode_worker.role import DecodeRole, check_answers, swap_slots
from baton.elastic_worker.config import ElasticConfig
from baton.engine.kv_cache.memory import LargestStep
from baton.engine.prepare import PreparedModel
from baton.prefill_worker.role import PrefillRole
from baton.process.affinity import lower_priority
from baton.process.registry.membership import Epoch
from baton.process.registry.worker_record import WorkerRole
from baton.protos import session_pb2
from baton.worker.host import EngineHost
from baton.worker.process import PROMPTS_AT_ONCE, end_on_error, run_worker, take_worker_epoch
from baton.worker.role import ROLES
from baton.worker.served import MakeRole, ServedWorker
from baton.worker.service import ChangeRole

logger = logging.getLogger(__name__)
DRAIN_POLL_S = 0.02


class ElasticWorker(ServedWorker):
    """Worker that changes its role on a router's command."""

    def __init__(
        self,
        config: ElasticConfig,
        prepared: PreparedModel,
        epoch: int,
        next_epoch: Callable[[], Awaitable[Epoch]],
        host: EngineHost | None = None,
    ) -> None:
        """Create a worker. `next_epoch` is called once per change of role, for a new epoch. `host`: None: created.

        Raises: ModelError.
        """
        if config.role is WorkerRole.DECODE:
            check_answers(prepared)
        rows = config.max_sequences if config.graphs else 0
        slots = swap_slots(config, prepared)
        host = host or EngineHost(config, prepared, slots, config.nice, rows)
        roles: dict[WorkerRole, MakeRole] = {
            WorkerRole.PREFILL: partial(PrefillRole, config),
            WorkerRole.DECODE: partial(DecodeRole, config),
        }
        super().__init__(config, host, epoch, config.role, roles)
        self._config = config
        self._next_epoch = next_epoch
        self._change: asyncio.Task[None] | None = None  # newest change of role; None: no change so far
        self._ending = False

    @property
    def _switching(self) -> bool:
        """Return whether the old role has stopped and the new one does not serve yet."""
        return self.serving is None and self._change is not None and not self._change.done()

    @property
    def busy(self) -> bool:
        return self._switching or super().busy

    def begin_drain(self) -> None:
        """Drain because the process will end. A change of role is cancelled while the old role still drains. After
        that, the change completes first.
        """
        self._ending = True
        if not self._switching and self._change is not None:
            self._change.cancel()
        super().begin_drain()

    async def stop(self) -> None:
        self._ending = True
        if self._change is not None:
            if not self._switching:
                self._change.cancel()
            await asyncio.gather(self._change, return_exceptions=True)
        await super().stop()

    def change_role(self, wanted: "session_pb2.Role") -> None:
        """Start a change of role, unless the worker already has that role, is changing its role, or is draining."""
        role = ROLES.get(wanted)
        if role is None or role is self.role or self._ending or (self._change and not self._change.done()):
            return
        self._change = asyncio.create_task(self._change_to(role), name=f"change to {role}")
        end_on_error(self._change, self._on_fault)

    async def _change_to(self, role: WorkerRole) -> None:
        old, began_s = self.serving, time.monotonic()
        if old is None:
            return
        logger.info("%s: draining to change its role to %s", self._config.worker_id, role)
        old.drain.begin()
        try:
            async with asyncio.timeout(self._config.role_drain_s):
                while old.busy:  # noqa: ASYNC110 -- the request table has no event
                    await asyncio.sleep(DRAIN_POLL_S)
                epoch = await self._next_epoch()
        except TimeoutError:
            logger.warning(
                "change of role cancelled: requests still open after %g s; the worker stays %s",
                self._config.role_drain_s,
                old.role,
            )
            old.drain.call_off()
            return
        drained_s = time.monotonic()
        await self._end_role()
        self.host.pass_on()
        await self._serve(role, epoch.number)
        self._on_role(epoch)
        if self._ending:
            super().begin_drain()
        now = time.monotonic()
        logger.info("serves as %s: drained in %.2f s, changed in %.2f s", role, drained_s - began_s, now - drained_s)

    async def _serve(self, role: WorkerRole, epoch: int, change_role: ChangeRole | None = None) -> None:
        lower_priority(self._config.nice if role is WorkerRole.PREFILL else 0)
        makes_answers = self.host.prepared.config.makes_answers
        await super()._serve(role, epoch, self.change_role if makes_answers else None)


MakeElastic = Callable[[ElasticConfig, PreparedModel, int, Callable[[], Awaitable[Epoch]]], ElasticWorker]


def main(config: ElasticConfig, make_worker: MakeElastic = ElasticWorker) -> int:
    """Run an elastic worker and return the exit code: 2 for an error that a restart would not fix."""
    sequences = config.max_sequences
    step = LargestStep(max(config.chunk_tokens, sequences), max(sequences, min(config.chunk_tokens, PROMPTS_AT_ONCE)))
    next_epoch = partial(take_worker_epoch, config)
    return run_worker(config, step, lambda prepared, epoch: make_worker(config, prepared, epoch, next_epoch))
