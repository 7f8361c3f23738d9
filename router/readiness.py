"""When this router may serve: a pair of workers is there, their model is loaded, and a canary came back.

waiting for a pair -> loading the tokenizer -> canary -> ready -> (a role has no workers left) -> waiting ...
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from router import canary
from router.admission import RETRY_AFTER_S
from router.cluster import Cluster
from router.defaults import ModelFolderError
from router.generation import Scheduling
from router.served_model import ServedModel, load_served_model
from router.worker import WorkerDescription, WorkerRole
from service.errors import BatonError, Unavailable

logger = logging.getLogger(__name__)

_RETRY_S = 0.5
_CANARY_S = 30.0  # a worker's first request may warm it


class Readiness:
    """`on_change` is awaited with whether the router is ready, whenever that changes."""

    def __init__(
        self,
        scheduling: Scheduling,
        model_folder: Path | None,
        model_name: str | None,
        wait_s: float,
        on_change: Callable[[bool], Awaitable[None]],
    ) -> None:
        """`wait_s` bounds how long a request waits for readiness."""
        self._scheduling = scheduling
        self._model_folder = model_folder
        self._model_name = model_name
        self._wait_s = wait_s
        self._on_change = on_change
        self._ready = asyncio.Event()
        self._changed = asyncio.Event()
        self._served: ServedModel | None = None
        self.detail = "waiting for workers"

    def notice(self) -> None:
        """The cluster may have changed."""
        self._changed.set()

    @property
    def ready(self) -> bool:
        return self._ready.is_set()

    async def served(self) -> ServedModel:
        """The model, once the router is ready. Raises: Unavailable after `wait_s`."""
        if not self.ready:
            try:
                async with asyncio.timeout(self._wait_s):
                    await self._ready.wait()
            except TimeoutError:
                raise Unavailable(f"not ready: {self.detail}", "NOT_READY", RETRY_AFTER_S) from None
        if self._served is None:
            raise RuntimeError("a ready router has a model")
        return self._served

    async def run(self) -> None:
        """Brings the router to readiness, and again whenever it is lost, until cancelled."""
        try:
            while True:
                if await self._prepare():
                    await self._set_ready(True)
                    while self._has_pair():
                        await self._change()
                    self.detail = "a role has no worker left"
                    await self._set_ready(False)
                else:
                    await self._change()
        finally:
            if self._served is not None:
                self._served.tokenizer.close()

    async def _change(self) -> None:
        await self._changed.wait()
        self._changed.clear()

    async def _prepare(self) -> bool:
        description = pair_of(self._scheduling.cluster, self._served.fingerprint if self._served else None)
        if description is None:
            return False
        try:
            served = await self._load(description)
            self.detail = "the canary is on its way"
            await canary.sing(served, self._scheduling, _CANARY_S)
        except (ModelFolderError, BatonError, canary.CanaryFailed) as error:
            if self.detail != str(error):
                logger.warning("not ready: %s", error)
            self.detail = str(error)
            await asyncio.sleep(_RETRY_S)
            self.notice()  # to try again
            return False
        return True

    async def _load(self, description: WorkerDescription) -> ServedModel:
        if self._served is not None and self._served.fingerprint == description.fingerprint:
            return self._served
        self.detail = "loading the tokenizer"
        served = await asyncio.to_thread(load_served_model, description, self._model_folder, self._model_name)
        if self._served is not None:
            self._served.tokenizer.close()
        self._served = served
        return served

    async def _set_ready(self, ready: bool) -> None:
        if ready:
            self.detail = ""
            self._ready.set()
            logger.info("ready")
        else:
            self._ready.clear()
            logger.warning("not ready: %s", self.detail)
        await self._on_change(ready)

    def _has_pair(self) -> bool:
        wanted = self._served.fingerprint if self._served else None
        description = pair_of(self._scheduling.cluster, wanted)
        return description is not None and description.fingerprint == wanted


def pair_of(cluster: Cluster, preferred: bytes | None) -> WorkerDescription | None:
    """A worker whose fingerprint both roles have now: of the preferred fingerprint if there is such."""
    present = [worker.description for worker in cluster.workers if worker.held and worker.description is not None]
    prefill = {description.fingerprint for description in present if description.role is WorkerRole.PREFILL}
    paired = [
        description
        for description in present
        if description.role is WorkerRole.DECODE and description.fingerprint in prefill
    ]
    return min(paired, key=lambda description: description.fingerprint != preferred, default=None)
