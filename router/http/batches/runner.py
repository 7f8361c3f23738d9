"""Runner of batches: takes over batches that no router runs, and yields to other requests.

A router that dies loses the locks of its batches. Any router of the same folder then continues them.
"""

import asyncio
import logging
from functools import partial
from pathlib import Path
from typing import Any

from baton.process.helper import Asks, HelperBusy, HelperFailed
from baton.router.dispatcher import Dispatcher
from baton.router.http.batches.check import answered, question
from baton.router.http.batches.held import HeldBatch, StoredRequest
from baton.router.http.batches.line import LINE_PRIORITY, LineAnswer, LineAnswerer
from baton.router.http.batches.records import EXPIRED, IN_PROGRESS, StoredBatch
from baton.router.http.batches.run import BatchRun
from baton.router.http.batches.storage import BatchStorage
from baton.router.http.batches.threads import completed
from baton.router.public.access import Access

POLL_S = 1.0
"""Period in which new and abandoned batches are found, in seconds."""
_SWEEP_S = 600.0  # period in which expired files are removed
_YIELD_S = 0.1  # period in which the queue is checked for other requests
_RETRY_S = 30.0  # pause after a failure of the disk or a helper
_MAX_RUNNING = 64
_EXPIRED = "the batch expired before this request was answered"

logger = logging.getLogger(__name__)


class BatchRunner:
    def __init__(
        self,
        storage: BatchStorage,
        answerer: LineAnswerer,
        checks: Asks,
        dispatcher: Dispatcher,
        access: Access,
        max_lines: int,
        max_line_bytes: int,
    ) -> None:
        """Create a runner. `checks`: process that runs check.py. `max_lines`: number of requests in flight."""
        self.storage = storage
        self._answerer = answerer
        self._checks = checks
        self._dispatcher = dispatcher
        self._access = access
        self._max_lines = max_lines
        self._max_line_bytes = max_line_bytes
        self._tenants: dict[str, str] = {}  # tenants of running batches, by id of the batch
        self._lines: dict[asyncio.Task[Any], None] = {}  # tasks of lines in flight, in order of their start
        self._yields = False  # True: other requests wait for capacity, so no line begins

    def close(self) -> None:
        self._checks.close()

    async def run(self) -> None:
        """Run batches until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._make_way())
            swept_s = -_SWEEP_S
            while True:
                try:
                    if (now_s := asyncio.get_running_loop().time()) >= swept_s + _SWEEP_S:
                        swept_s = now_s
                        await asyncio.to_thread(self.storage.sweep)
                    for folder in await asyncio.to_thread(self.storage.unfinished):
                        await self._take(folder, tasks)
                except OSError as error:
                    logger.warning("folder of batches failed: %s; retrying in %g s", error, POLL_S)
                await asyncio.sleep(POLL_S)

    async def _take(self, folder: Path, tasks: asyncio.TaskGroup) -> None:
        """Begin a batch, unless it runs already or this router stops. Raises: OSError."""
        if folder.name in self._tenants or len(self._tenants) >= _MAX_RUNNING or self._dispatcher.draining:
            return
        held = await completed(HeldBatch.take, self.storage, folder)
        if held is not None:
            self._tenants[folder.name] = held.batch.tenant
            tasks.create_task(self._serve(held))

    async def _serve(self, held: HeldBatch) -> None:
        name = held.batch.id
        try:
            await self._finish(held)
            batch = held.batch
            logger.info("batch %s: %s; %d of %d answered", name, batch.status, batch.completed, batch.total)
        except (OSError, HelperFailed, HelperBusy) as error:
            logger.warning("batch %s failed: %s; retrying in %g s", name, error, _RETRY_S)
            await asyncio.sleep(_RETRY_S)
        finally:
            del self._tenants[name]
            held.release()

    async def _finish(self, held: HeldBatch) -> None:
        """Bring a batch to its final status, unless this router stops. Raises: OSError, HelperFailed, HelperBusy."""
        if held.batch.outcome:
            await completed(held.finish, held.batch.outcome)
        elif held.is_checked or await self._check(held):
            run = BatchRun(held, partial(self._answer, held.batch))
            outcome = await run.answer_all(partial(self._room, held.batch.tenant), lambda: self._dispatcher.draining)
            if outcome == EXPIRED:
                await completed(held.fail_rest, "batch_expired", _EXPIRED)
            if outcome is not None:
                await completed(held.finish, outcome)

    async def _check(self, held: HeldBatch) -> bool:
        """Check the input file; return whether it is valid. Raises: OSError, HelperFailed, HelperBusy."""
        asked = question(held.input_path, held.requests_part, held.batch.endpoint, self._max_line_bytes)
        checked = answered(await self._checks.ask(asked))
        if checked.errors:
            await completed(held.reject, checked.errors)
            return False
        changes = {"total": checked.total, "model": checked.model}
        await completed(held.save, held.batch.moved(IN_PROGRESS, self.storage.now_s(), **changes))
        await completed(held.accept_requests)
        return True

    async def _answer(self, batch: StoredBatch, request: StoredRequest) -> LineAnswer:
        caller, line = self._access.caller_named(batch.tenant), asyncio.current_task()
        if caller is None or line is None:
            raise asyncio.CancelledError  # the key was removed, and the run ends soon
        self._lines[line] = None
        try:
            return await self._answerer.answer(batch.endpoint, request.body, caller)
        finally:
            del self._lines[line]

    def _room(self, tenant: str) -> int:
        """Return how many lines of a tenant's batch may be in flight; negative if the API key was removed.

        Batches share the lines evenly. They use at most half of the concurrency of an API key.
        """
        caller = self._access.caller_named(tenant)
        if caller is None:
            return -1
        if self._yields:
            return 0
        share = self._max_lines // len(self._tenants)
        if (most := caller.limits.concurrency) is not None:
            share = min(share, most // 2 // list(self._tenants.values()).count(tenant))
        return max(1, share)

    async def _make_way(self) -> None:
        """While other requests wait for capacity, begin no lines, and cancel one after another, the newest first."""
        while True:
            await asyncio.sleep(_YIELD_S)
            waits = self._dispatcher.lacks_room_before(LINE_PRIORITY)
            if waits and self._yields and (newest := next(reversed(self._lines), None)) is not None:
                newest.cancel()
            self._yields = waits
