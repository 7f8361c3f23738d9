"""Readiness of this router: each needed role has a worker, the model's tokenizer is loaded, and a probe was answered.

waiting for workers -> loading the tokenizer -> probe -> ready -> (a needed role has no worker) -> waiting for workers

An answer needs a decode worker, and a prefill worker unless decode workers may compute prompts. If decode
workers may, the first prefill worker can connect later, and another probe tests it while requests are served.
"""

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Set

from baton.process.errors import BatonError
from baton.process.registry.worker_record import WorkerRole
from baton.router.model.defaults import ModelFolderError
from baton.router.model.served_model import ModelGate, ServedModel, ServedModelSettings, load_served_model
from baton.router.placement.cluster import Cluster
from baton.router.placement.decide import Placement
from baton.router.request.run import RequestDeps, RequestRunner
from baton.router.trace.record import Timeline
from baton.router.types.request import Operation, Sampling, TokenPrompt, ValidRequest
from baton.router.types.response import Delta
from baton.router.types.worker import WorkerDescription

logger = logging.getLogger(__name__)

_TOKENS = 2  # tokens of a probe's answer: one from the prefill worker, one from the decode worker
_PROBE_S = 30.0  # deadline of a probe: long, because workers may have to warm up
_RETRY_S = 0.5


class ProbeFailed(Exception):
    """Error: the readiness probe was answered incorrectly."""


async def probe(served: ServedModel, scheduling: RequestDeps, time_left_s: float) -> Placement:
    """Send one short greedy request through a prefill worker, a transfer and a decode worker, or a decode worker alone.

    Return the request's placement. Raises: ProbeFailed, BatonError.
    """
    pooling = served.pooled_alone()
    # The prompt has one complete block and one token, so that a block's KV is transferred.
    prompt_tokens = max(1, min(served.block_tokens + 1, served.max_model_len - _TOKENS))
    token_ids = tuple(itertools.islice(itertools.cycle(range(served.vocab_size)), prompt_tokens))
    valid = ValidRequest(
        operation=Operation.GENERATE if pooling is None else Operation.EMBED,
        prompt=TokenPrompt(token_ids),
        request_id="readiness-probe",
        sampling=Sampling(max_tokens=_TOKENS, seed=0, stop_token_ids=(), n=1),
        cache_salt=f"probe-{secrets.token_hex(8)}",
        pooling=pooling,
    )
    now = time.monotonic()
    timeline = Timeline(arrived_s=now)
    generation = RequestRunner(
        await served.prepare(valid, scheduling.fleet.adapters.open_requests.weights),
        scheduling,
        timeline,
        served.tokenizer.detokenizer,
        deadline_s=now + time_left_s,
        is_usual=False,  # the duration of a probe predicts nothing about requests
    )
    tokens = 0
    async for event in generation.events():
        tokens += len(event.token_ids) if isinstance(event, Delta) else 0
    if pooling is None and tokens != _TOKENS:
        raise ProbeFailed(f"the readiness probe got {tokens} tokens instead of {_TOKENS}")
    placement = timeline.placement
    if placement is None:
        raise RuntimeError("the readiness probe was answered, but it has no placement")
    if placement.prefill is not None and timeline.kv_received is None:
        raise ProbeFailed("the readiness probe got no report of its KV transfer from the decode worker")
    return placement


class Readiness:
    """State machine of this router's readiness. `on_change` is awaited at every change of it."""

    def __init__(
        self,
        scheduling: RequestDeps,
        decode_may_prefill: bool,
        source: ServedModelSettings,
        wait_s: float,
        on_change: Callable[[bool], Awaitable[None]],
    ) -> None:
        """Create the state machine. `wait_s`: maximum time that a request waits until the router is ready."""
        self._scheduling = scheduling
        self._answers_need = frozenset({WorkerRole.DECODE} if decode_may_prefill else WorkerRole)
        self._prefill_probed = False
        self._serving: WorkerDescription | None = None  # description of a worker that has the served model
        self._logged: frozenset[str] = frozenset()  # refusals that were logged already
        self._source = source
        self._on_change = on_change
        self._changed = asyncio.Event()
        self.gate = ModelGate(wait_s)

    @property
    def needed(self) -> Set[WorkerRole]:
        """Roles that must have a worker so that requests can be served."""
        serving = self._serving
        return self._answers_need if serving is None or serving.model.makes_answers else {WorkerRole.PREFILL}

    def notice(self) -> None:
        """Check the readiness again soon, because the cluster may have changed."""
        self._changed.set()

    @property
    def ready(self) -> bool:
        return self.gate.is_open

    @property
    def detail(self) -> str:
        """Reason why the router is not ready, or is ready only with restrictions; empty if all is well."""
        if self.ready and not self.gate.detail and self._prefill_untried:
            return "a prefill worker awaits its readiness probe"
        return self.gate.detail

    @property
    def refused(self) -> dict[str, str]:
        """Reason why each unsuitable worker gets no requests, by endpoint."""
        found = dict[str, str]()
        for worker in self._scheduling.cluster.workers:
            if worker.held and worker.description is not None and self._serving is not None:
                lacks = self._scheduling.fleet.adapters.why_without_weights(worker.description)
                found[worker.endpoint] = worker.description.differs_from(self._serving) or lacks
            elif worker.refused is not None:
                found[worker.endpoint] = worker.refused.why
        return {endpoint: why for endpoint, why in found.items() if why}

    def _refusals(self) -> list[str]:
        """Return a sentence for each worker that gets no requests, for logs and errors."""
        name_of = self._scheduling.cluster.name_of
        return [f"{name_of(endpoint)} is refused: {why}" for endpoint, why in self.refused.items()]

    def _log_refusals(self) -> None:
        """Log each refusal that the last call did not find."""
        refusals = self._refusals()
        for refusal in refusals:
            if refusal not in self._logged:
                logger.error("%s", refusal)
        self._logged = frozenset(refusals)

    async def run(self) -> None:
        """Report the router as ready while it can answer, until cancelled."""
        try:
            while True:
                if await self._prepare():
                    await self._set_ready(True)
                    while self._can_answer():
                        await self._try_prefill()
                        await self._change()
                    self.gate.detail = "; ".join(["a required role has no worker", *self._refusals()])
                    await self._set_ready(False)
                else:
                    await self._change()
        finally:
            if self.gate.served is not None:
                self.gate.served.close()

    async def _change(self) -> None:
        await self._changed.wait()
        self._changed.clear()
        self._log_refusals()

    async def _prepare(self) -> bool:
        description = self._answering()
        if description is None:
            if refusals := self._refusals():
                self.gate.detail = "; ".join(["waiting for workers", *refusals])
            return False
        try:
            served = await self._load(description)
            self._serving = description
            self.gate.detail = "the readiness probe is running"
            await self._probe(served)
        except (ModelFolderError, BatonError, ProbeFailed) as error:
            await self._failed(str(error))
            return False
        return True

    async def _probe(self, served: ServedModel) -> None:
        placement = await probe(served, self._scheduling, _PROBE_S)
        self._prefill_probed = placement.computes_for_others
        self.gate.detail = ""

    @property
    def _prefill_untried(self) -> bool:
        """True if a prefill worker is connected, but no probe was answered through a prefill worker."""
        served = self.gate.served
        if served is None or self._prefill_probed:
            return False
        return _has_prefill(self._scheduling.cluster, served.fingerprint)

    async def _try_prefill(self) -> None:
        """Probe the first connected prefill worker. The probe is cancelled if no worker can answer any more."""
        if self.gate.served is None or not _has_prefill(self._scheduling.cluster, self.gate.served.fingerprint):
            self._prefill_probed, self.gate.detail = False, ""
            return
        if not self._prefill_untried:
            return
        probing = asyncio.create_task(self._probe(self.gate.served))
        probing.add_done_callback(lambda _: self.notice())
        try:
            while self._can_answer() and not probing.done():
                await self._change()
            if probing.done():
                await probing
                if self._prefill_untried:  # a decode worker answered the probe alone: retry after a pause
                    await asyncio.sleep(_RETRY_S)
        except (BatonError, ProbeFailed) as error:
            await self._failed(f"the readiness probe through a prefill worker failed: {error}")
        finally:
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)
            self.notice()  # so that the caller checks for changes during the probe

    async def _failed(self, detail: str) -> None:
        """Log a failure, unless it was just logged, and request another check after _RETRY_S."""
        if self.gate.detail != detail:
            logger.warning("%s: %s", "degraded" if self.ready else "not ready", detail)
        self.gate.detail = detail
        await asyncio.sleep(_RETRY_S)
        self.notice()

    async def _load(self, description: WorkerDescription) -> ServedModel:
        if self.gate.served is not None and self.gate.served.fingerprint == description.fingerprint:
            return self.gate.served
        self.gate.detail = "loading the tokenizer"
        served = await asyncio.to_thread(load_served_model, description, self._source)
        if self.gate.served is not None:
            self.gate.served.close()
        self.gate.served = served
        return served

    async def _set_ready(self, ready: bool) -> None:
        if ready:
            self.gate.open()
            logger.info("ready")
        else:
            self.gate.close()
            logger.warning("not ready: %s", self.gate.detail)
        await self._on_change(ready)

    def _can_answer(self) -> bool:
        """Return whether the connected workers can answer requests to the loaded model."""
        description = self._answering()
        served = self.gate.served
        return description is not None and served is not None and description.fingerprint == served.fingerprint

    def _answering(self) -> WorkerDescription | None:
        wanted = self.gate.served.fingerprint if self.gate.served else None
        return answering(self._scheduling.cluster, wanted, self._answers_need)


def answering(cluster: Cluster, preferred: bytes | None, needed: Set[WorkerRole]) -> WorkerDescription | None:
    """Return a decode worker of a model whose needed roles all have workers, or a prefill worker of a model that only
    computes vectors; None if there is none.

    Workers with the preferred fingerprint come first, then those whose model has a prefill worker.
    """
    prefill = _present(cluster, WorkerRole.PREFILL)
    paired = {description.fingerprint for description in prefill}
    decode = [
        (description.fingerprint != preferred, description.fingerprint not in paired, description)
        for description in _present(cluster, WorkerRole.DECODE)
        if description.fingerprint in paired or WorkerRole.PREFILL not in needed
    ]
    decode += [
        (description.fingerprint != preferred, False, description)
        for description in prefill
        if not description.model.makes_answers
    ]
    return min(decode, key=lambda candidate: candidate[:2])[-1] if decode else None


def _present(cluster: Cluster, role: WorkerRole) -> list[WorkerDescription]:
    descriptions = [worker.description for worker in cluster.workers if worker.held]
    return [description for description in descriptions if description is not None and description.role is role]


def _has_prefill(cluster: Cluster, fingerprint: bytes) -> bool:
    return any(description.fingerprint == fingerprint for description in _present(cluster, WorkerRole.PREFILL))
