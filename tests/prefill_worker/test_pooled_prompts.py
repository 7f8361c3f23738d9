"""Prompts that a prefill worker computes for a vector: no transfer, nothing pinned, and every block free at the end."""

from typing import Any

import pytest

from baton.protos import session_pb2
from tests.fixtures.session_client import SessionClient
from tests.fixtures.worker_stack import BLOCK_TOKENS, BLOCKS, PrefillStack, prompt_command, running

LAST, MEAN, CLS = session_pb2.POOLING_KIND_LAST, session_pb2.POOLING_KIND_MEAN, session_pb2.POOLING_KIND_CLS


def command(attempt_id: int, kind: Any = LAST, tokens: int = 20, **fields: Any) -> session_pb2.Prefill:
    return prompt_command(attempt_id, b"", tokens, pooling=session_pb2.Pooling(kind=kind), **fields)


def hashes(blocks: int) -> list[bytes]:
    return [bytes([number]) * 32 for number in range(1, blocks + 1)]


@pytest.mark.parametrize(("kind", "vector"), [(LAST, [20.0, 1.0]), (MEAN, [10.5, 1.0]), (CLS, [1.0, 1.0])])
async def test_vector_of_several_chunks_is_sent_once_and_frees_all_blocks(kind: Any, vector: list[float]) -> None:
    async with running(PrefillStack(chunk_tokens=8)) as stack, SessionClient(stack.endpoint) as router:
        await router.send(prefill=command(1, kind))
        step = await router.one("first_step", 1)
        assert list(step.pooled) == pytest.approx(vector) and not step.outputs
        assert len(step.timings.chunk_ms) == 3
        await stack.all_free()
        assert not stack.service.busy


async def test_cached_prefix_is_skipped_where_the_pooling_allows_it() -> None:
    async with running(PrefillStack(chunk_tokens=8)) as stack, SessionClient(stack.endpoint) as router:
        names = hashes(20 // BLOCK_TOKENS)
        await router.send(prefill=command(1, LAST, block_hashes=names))
        assert (await router.one("first_step", 1)).timings.cached_tokens == 0
        for attempt_id, kind, cached_tokens in ((2, LAST, 16), (3, MEAN, 0), (4, CLS, 0)):
            await router.send(prefill=command(attempt_id, kind, block_hashes=names))
            step = await router.one("first_step", attempt_id)
            assert step.timings.cached_tokens == cached_tokens
            assert list(step.pooled) == pytest.approx({LAST: [20.0, 1.0], MEAN: [10.5, 1.0], CLS: [1.0, 1.0]}[kind])


async def test_hidden_states_that_are_not_finite_fail_the_prompt() -> None:
    async with running(PrefillStack()) as stack, SessionClient(stack.endpoint) as router:
        stack.runner.poison = {1}
        await router.send(prefill=command(1))
        assert (await router.one("failed", 1)).reason == session_pb2.FAILURE_REASON_NONFINITE
        await stack.all_free()


async def test_kind_that_the_worker_does_not_know_is_refused_by_name() -> None:
    async with running(PrefillStack()) as stack, SessionClient(stack.endpoint) as router:
        await router.send(prefill=command(1, kind=99))
        failed = await router.one("failed", 1)
        assert failed.reason == session_pb2.FAILURE_REASON_INVALID
        assert failed.message == "pooling.kind: number 99 is not known here"


async def test_prompt_may_be_as_long_as_the_context_and_no_longer() -> None:
    async with running(PrefillStack(chunk_tokens=64)) as stack, SessionClient(stack.endpoint) as router:
        assert BLOCKS * BLOCK_TOKENS >= 100
        await router.send(prefill=command(1, tokens=100))
        await router.one("first_step", 1)
        await router.send(prefill=command(2, tokens=101))
        assert (await router.one("failed", 2)).reason == session_pb2.FAILURE_REASON_INVALID
