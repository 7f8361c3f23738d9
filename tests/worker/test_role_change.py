"""A worker process changes its role over real weights: its cache stays, its answers are the same, nothing is left."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from baton.elastic_worker.config import ElasticConfig
from baton.elastic_worker.elastic import ElasticWorker
from baton.engine.prepare import ModelOptions, prepare_model
from baton.process.registry.membership import Epoch
from baton.process.registry.worker_record import WorkerRole
from baton.protos import sampling_pb2, session_pb2
from tests.fixtures.loop_clock import put_forward
from tests.fixtures.real_workers import served
from tests.fixtures.session_client import SessionClient, eventually

BLOCK_TOKENS = 4
PROMPT = [3 + (7 * i) % 200 for i in range(41)]
HASHES = [bytes([i]) * 32 for i in range(len(PROMPT) // BLOCK_TOKENS)]


@asynccontextmanager
async def elastic(folder: Path, role: str, **flags: Any) -> AsyncIterator[tuple[ElasticWorker, str]]:
    prepared = prepare_model(ModelOptions(folder, torch.device("cpu"), "float32", BLOCK_TOKENS, 1 << 20, None, "auto"))
    config = ElasticConfig(worker_id="w-0", model=folder, role=WorkerRole(role), block_size=BLOCK_TOKENS, **flags)
    epochs = iter(range(2, 100))

    async def next_epoch() -> Epoch:
        return Epoch(next(epochs))

    worker = ElasticWorker(config, prepared, 1, next_epoch)
    async with served(worker) as endpoint:
        yield worker, endpoint


def command(attempt_id: int, max_tokens: int = 6) -> dict[str, Any]:
    return {
        "attempt_id": attempt_id,
        "transfer_id": attempt_id.to_bytes(16, "big"),
        "token_ids": PROMPT,
        "sampling": sampling_pb2.Sampling(max_tokens=max_tokens, n=1, top_p=1.0),
        "block_hashes": HASHES,
        "time_left_ms": 200_000,
    }


async def change(worker: ElasticWorker, router: SessionClient, role: int) -> None:
    await router.send(change_role=session_pb2.ChangeRole(role=role))  # type: ignore[arg-type]
    wanted = "prefill" if role == session_pb2.ROLE_PREFILL else "decode"
    await eventually(lambda: worker.role == wanted and not worker.busy)


async def answer(endpoint: str, attempt_id: int, epoch: int) -> tuple[list[int], int]:
    """Of a decode worker that computes the prompt itself: the tokens, and how much of the prompt was cached."""
    async with SessionClient(endpoint) as router:
        await router.send(start=session_pb2.Start(**command(attempt_id)))
        first = await router.one("first_step", attempt_id)
        await eventually(lambda: len(router.outputs(attempt_id)) == 5)
        rest = [token for output in router.outputs(attempt_id) for token in output.token_ids]
        assert {message.epoch for message in router.heard} == {epoch}
        return [*first.outputs[0].token_ids, *rest], first.timings.cached_tokens


async def test_decode_worker_becomes_prefill_and_decode_again_with_its_cache(checkpoint: Path) -> None:
    async with elastic(checkpoint, "decode") as (worker, endpoint):
        tokens, cached = await answer(endpoint, 1, epoch=1)
        assert cached == 0
        async with SessionClient(endpoint) as router:
            assert router.welcome is not None
            pool_id = router.welcome.worker.pool_id
            await change(worker, router, session_pb2.ROLE_PREFILL)
        async with SessionClient(endpoint) as router:
            assert router.welcome is not None
            assert router.welcome.worker.role == session_pb2.ROLE_PREFILL
            assert router.welcome.worker.pool_id == pool_id != b"", "the process is the same"
            await router.send(prefill=session_pb2.Prefill(**command(2)))
            first = await router.one("first_step", 2)
            assert first.timings.cached_tokens == 40
            assert list(first.outputs[0].token_ids) == tokens[:1]
            await router.send(cancel=session_pb2.Cancel(attempt_id=2))
            await change(worker, router, session_pb2.ROLE_DECODE)
        assert await answer(endpoint, 3, epoch=3) == (tokens, 40)


async def test_role_change_drains_first_and_takes_prompts_that_cross_the_notice(checkpoint: Path) -> None:
    async with elastic(checkpoint, "prefill") as (worker, endpoint), SessionClient(endpoint) as router:
        await router.send(prefill=session_pb2.Prefill(**command(1)))
        await router.one("first_step", 1)
        await router.send(change_role=session_pb2.ChangeRole(role=session_pb2.ROLE_DECODE))
        await eventually(lambda: router.of_kind("report") and router.of_kind("report")[-1].draining)
        await router.send(prefill=session_pb2.Prefill(**command(2)))
        await router.one("first_step", 2)
        assert worker.role == "prefill", "it left before the KV of its prompts was taken"
        await router.cancel(1)
        await router.cancel(2)
        await eventually(lambda: worker.role == "decode")


async def test_drain_that_takes_too_long_is_called_off(checkpoint: Path) -> None:
    async with (
        elastic(checkpoint, "prefill", role_drain_s=60.0) as (worker, endpoint),
        SessionClient(endpoint) as router,
    ):
        await router.send(prefill=session_pb2.Prefill(**command(1)))
        await router.one("first_step", 1)
        await router.send(change_role=session_pb2.ChangeRole(role=session_pb2.ROLE_DECODE))
        await eventually(lambda: router.of_kind("report") and router.of_kind("report")[-1].draining)
        put_forward(60.0)
        await eventually(lambda: not router.of_kind("report")[-1].draining)
        await router.send(prefill=session_pb2.Prefill(**command(2)))
        await router.one("first_step", 2)
        assert worker.role == "prefill"
