"""An exception while the outcome of one answer is sent ends that answer, and no other."""

import pytest

from baton.decode_worker.answer import Answer
from baton.engine.scheduler.sequences import TokenMade
from baton.protos import session_pb2
from tests.fixtures.session_client import SessionClient, eventually
from tests.fixtures.worker_stack import DecodeStack, running, start_command


async def test_answer_with_failing_output_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Answer.take

    def fails_for_one(self: Answer, made: TokenMade, may_wait: bool) -> session_pb2.SequenceOutput | None:
        if self.attempt_id == 1:
            raise ValueError("a choice beyond 32 bits")
        return take(self, made, may_wait)

    monkeypatch.setattr(Answer, "take", fails_for_one)
    async with running(DecodeStack()) as stack, SessionClient(stack.endpoint) as router:
        for attempt_id in (1, 2):
            await router.send(start=start_command(attempt_id, b"", ""))
        failed = await router.one("failed", 1)
        assert failed.message == "internal error of the decode worker"
        await eventually(lambda: len(router.outputs(2)) == 3)
        assert not router.about("failed", 2)
        await stack.all_free()
