"""Prompts that a decode worker computes itself: told as a prefill worker would, beside what runs, within the pool."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from baton.protos import session_pb2
from baton.text.block_hash import HashChain, root_hash
from tests.fixtures.held_runner import token
from tests.fixtures.session_client import SessionClient, eventually
from tests.fixtures.worker_stack import BLOCK_TOKENS, BLOCKS, DecodeStack, running, start_command

ROOT = root_hash(b"model", "float32")


@dataclass
class Alone:
    """A decode worker without any prefill worker, and one router's session with it."""

    decode: DecodeStack
    router: SessionClient

    async def ask(self, attempt_id: int, **fields: Any) -> None:
        await self.router.send(start=start_command(attempt_id, b"", "", **fields))

    async def has_answer(self, attempt_id: int, choice: int = 0, tokens: int = 10, max_tokens: int = 4) -> None:
        """Token 0 by FirstStep, the others by StepOutputs."""
        await eventually(lambda: len(self.answer(attempt_id, choice)) == max_tokens)
        assert self.answer(attempt_id, choice) == [token(choice, tokens + offset) for offset in range(max_tokens)]

    def answer(self, attempt_id: int, choice: int = 0) -> list[int]:
        first = [output for step in self.router.about("first_step", attempt_id) for output in step.outputs]
        made: list[int] = []
        for output in [*first, *self.router.outputs(attempt_id, choice)]:
            if output.choice == choice:
                assert output.offset == len(made)
                made += output.token_ids
        return made

    async def queues(self, requests: int) -> None:
        """They have arrived, and wait for the step under way."""
        await eventually(lambda: self.decode.service._admission.waiting == requests)

    async def reports(self, matches: Callable[[Any], bool]) -> None:
        """Until such a report comes: what the engine has counted may follow what it has made."""

        def is_here() -> bool:
            self.decode.service.report()
            return any(map(matches, self.router.of_kind("report")[-1:]))

        await eventually(is_here)


@asynccontextmanager
async def alone(**decode: Any) -> AsyncIterator[Alone]:
    async with running(DecodeStack(**decode)) as stack, SessionClient(stack.endpoint) as router:
        yield Alone(stack, router)
        await stack.all_free()
        assert not stack.service.busy


async def test_every_choice_begins_with_first_step_and_nothing_lands() -> None:
    async with alone() as worker:
        await worker.ask(1, n=3)
        for choice in range(3):
            await worker.has_answer(1, choice)
        [first_step] = worker.router.about("first_step", 1)
        assert [output.choice for output in first_step.outputs] == [0, 1, 2]
        timings = first_step.timings
        assert len(timings.chunk_ms) == 2  # 10 tokens, at most 8 in one step
        assert timings.queue_ms + sum(timings.chunk_ms) <= timings.total_ms + 1.0
        assert not worker.router.about("landed", 1)


async def test_answer_of_one_token_is_in_first_step() -> None:
    async with alone() as worker:
        await worker.ask(1, max_tokens=1)
        [output] = (await worker.router.one("first_step", 1)).outputs
        assert output.end == session_pb2.END_REASON_LENGTH
        assert not worker.router.outputs(1)


async def test_prompt_is_computed_next_to_running_answers() -> None:
    async with alone(chunk_tokens=8) as worker:
        worker.decode.runner.hold()
        await worker.ask(1, tokens=4, max_tokens=20)
        await eventually(worker.decode.runner.stepping.is_set)
        await worker.ask(2, tokens=30)
        await worker.queues(1)
        worker.decode.runner.let_go()
        await worker.has_answer(1, tokens=4, max_tokens=20)
        await worker.has_answer(2, tokens=30)
        shapes = [[len(chunk.token_ids) for chunk in plan.chunks] for plan in worker.decode.runner.plans]
        assert [1, 7] in shapes, "one token of the answer, then the prompt"


async def test_logprobs_are_sent_with_the_first_tokens() -> None:
    async with alone() as worker:
        await worker.ask(1, sampling={"logprobs": 2})
        [output] = (await worker.router.one("first_step", 1)).outputs
        assert (list(output.logprobs), list(output.top_token_ids)) == ([-0.5], [0, 1])
        await worker.has_answer(1)


async def test_second_turn_finds_the_blocks_of_the_answer() -> None:
    async with alone() as worker:
        await worker.ask(1, tokens=6, max_tokens=8, cache_root=ROOT)
        await worker.has_answer(1, tokens=6, max_tokens=8)
        turn = [*range(1, 7), *worker.answer(1), 5, 5, 5]
        command = start_command(2, b"", "", cache_root=ROOT)
        del command.token_ids[:]
        command.token_ids.extend(turn)
        command.block_hashes.extend(HashChain(ROOT, BLOCK_TOKENS).first(len(turn) // BLOCK_TOKENS, turn))
        await worker.router.send(start=command)
        first_step = await worker.router.one("first_step", 2)
        assert first_step.timings.cached_tokens == 12  # of 13 tokens that have KV
        await worker.reports(lambda report: (report.cache_query_tokens, report.cache_hit_tokens) == (6 + 17, 12))
        await eventually(lambda: not worker.decode.service.busy)


async def test_cancel_while_the_prompt_is_computed_frees_its_pages() -> None:
    async with alone() as worker:
        worker.decode.runner.hold()
        await worker.ask(1, tokens=60)
        await eventually(worker.decode.runner.stepping.is_set)
        await worker.router.cancel(1)
        await eventually(lambda: not worker.decode.service.busy)
        worker.decode.runner.let_go()
        await worker.decode.all_free()
        assert not worker.router.about("first_step", 1)


async def test_deadline_ends_a_prompt_being_computed() -> None:
    async with alone() as worker:
        worker.decode.runner.hold()
        await worker.ask(1, tokens=60, time_left_ms=200)
        assert (await worker.router.one("failed", 1)).reason == session_pb2.FAILURE_REASON_DEADLINE
        worker.decode.runner.let_go()


async def test_nonfinite_prompt_fails_alone() -> None:
    async with alone() as worker:
        worker.decode.runner.poison = {1}
        await worker.ask(1)
        await worker.ask(2)
        assert (await worker.router.one("failed", 1)).reason == session_pb2.FAILURE_REASON_NONFINITE
        await worker.has_answer(2)


@pytest.mark.parametrize("host_slots", [0, BLOCKS])
async def test_answers_that_outgrow_the_pool_are_preempted_and_complete(host_slots: int) -> None:
    async with alone(host_slots=host_slots, chunk_tokens=64) as worker:
        await worker.ask(1, tokens=20, max_tokens=40, n=4)  # 5 blocks for all and 10 for each; there are 32
        for choice in range(4):
            await worker.has_answer(1, choice, tokens=20, max_tokens=40)
        await worker.reports(lambda report: report.preemptions > 0)
        assert any(plan.swaps_out for plan in worker.decode.runner.plans) is (host_slots > 0)


async def test_prompt_waits_behind_a_reservation_that_came_before() -> None:
    async with alone() as worker:
        worker.decode.runner.hold()
        await worker.ask(1, tokens=60, max_tokens=40)
        await eventually(worker.decode.runner.stepping.is_set)
        await worker.router.send(start=start_command(2, b"2" * 16, "127.0.0.1:1", tokens=90, max_tokens=10))
        await worker.ask(3)
        await worker.queues(2)
        worker.decode.runner.let_go()
        assert (await worker.router.one("failed", 2)).reason == session_pb2.FAILURE_REASON_TRANSFER
        await worker.has_answer(3)
        await worker.reports(lambda report: report.waiting_requests == 0)
        await eventually(lambda: not worker.decode.service.busy)


async def test_prompt_for_a_vector_is_one_first_step_and_nothing_is_kept_of_it() -> None:
    async with alone(chunk_tokens=8) as worker:
        names, last = [bytes([number]) * 32 for number in range(1, 6)], session_pb2.POOLING_KIND_LAST
        pooling = session_pb2.Pooling(kind=last)
        for attempt_id, cached_tokens in ((1, 0), (2, 16)):
            await worker.ask(attempt_id, tokens=20, max_tokens=1, block_hashes=names, pooling=pooling)
            step = await worker.router.one("first_step", attempt_id)
            assert list(step.pooled) == pytest.approx([20.0, 1.0]) and not step.outputs
            assert step.timings.cached_tokens == cached_tokens
        assert not worker.router.outputs(1) and len(worker.decode.service._table.ended) == 0


async def test_mean_pooling_ignores_the_cache_and_waits_for_answers() -> None:
    async with alone(chunk_tokens=8) as worker:
        worker.decode.runner.hold()
        await worker.ask(1, tokens=4, max_tokens=20, n=4)
        await eventually(worker.decode.runner.stepping.is_set)
        pooling = session_pb2.Pooling(kind=session_pb2.POOLING_KIND_MEAN)
        await worker.ask(2, tokens=100, max_tokens=1, block_hashes=[bytes([1]) * 32] * 25, pooling=pooling)
        await worker.queues(1)
        worker.decode.runner.let_go()
        assert list((await worker.router.one("first_step", 2)).pooled) == pytest.approx([50.5, 1.0])
        for choice in range(4):
            await worker.has_answer(1, choice, tokens=4, max_tokens=20)
