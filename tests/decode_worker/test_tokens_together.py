"""Tokens of an answer that is not streamed: sent together, each once, and before a failure."""

from collections.abc import Sequence
from typing import Any

from baton.decode_worker.answer import Answer, answer_to
from baton.engine.request import Drawn, EndReason
from baton.engine.scheduler.sequences import TokenMade
from baton.protos import session_pb2
from tests.fixtures.held_runner import token
from tests.fixtures.session_client import SessionClient, eventually
from tests.fixtures.worker_stack import DecodeStack, running, start_command

PROMPT_TOKENS = 10
STOP = session_pb2.END_REASON_STOP


def answer(together: int, **sampling: Any) -> Answer:
    """Return an answer whose first token was sent with FirstStep."""
    command = start_command(1, b"", "", tokens_together=together, sampling=sampling)
    link: Any = None
    begun = answer_to(command, 1, link, 4)
    begun.retained.add(0, Drawn(100, 0.0), None)
    return begun


def made(offset: int, choice: int = 0, end: EndReason | None = None) -> TokenMade:
    return TokenMade(1, choice, offset, Drawn(100 + offset, -float(offset)), end, 0)


def tokens(outputs: Sequence[session_pb2.SequenceOutput | None]) -> list[tuple[int, list[int]]]:
    """Return offset and tokens of each output."""
    return [(each.offset, list(each.token_ids)) for each in outputs if each is not None]


def test_answer_sends_first_output_then_groups_then_its_end() -> None:
    whole = answer(3, logprobs=0)
    ends = {6: EndReason.STOP}
    outputs = [whole.take(made(offset, end=ends.get(offset)), may_wait=True) for offset in range(1, 7)]
    assert tokens(outputs) == [(1, [101]), (2, [102, 103, 104]), (5, [105, 106])]
    assert [list(each.logprobs) for each in outputs if each is not None][1] == [-2.0, -3.0, -4.0]
    assert outputs[-1] is not None and outputs[-1].end == STOP


def test_choices_of_an_answer_wait_apart() -> None:
    whole = answer(2)
    outputs = [whole.take(made(offset, choice), may_wait=True) for offset in range(1, 4) for choice in range(2)]
    sent = [(1, [101]), (1, [101]), (2, [102, 103]), (2, [102, 103])]
    assert tokens(outputs) == sent


def test_token_that_may_not_wait_takes_the_waiting_ones_along() -> None:
    whole = answer(64)
    outputs = [whole.take(made(offset), may_wait=offset < 4) for offset in range(1, 5)]
    assert tokens(outputs) == [(1, [101]), (2, [102, 103, 104])]


def test_streamed_answer_sends_each_token() -> None:
    streamed = answer(0)
    outputs = [streamed.take(made(offset), may_wait=True) for offset in range(1, 4)]
    assert tokens(outputs) == [(1, [101]), (2, [102]), (3, [103])]


def test_waiting_tokens_are_sent_once() -> None:
    whole = answer(64)
    for offset in range(1, 4):
        whole.take(made(offset), may_wait=True)
    assert tokens(list(whole.take_held())) == [(2, [102, 103])]
    assert not list(whole.take_held())


def test_adopted_answer_sends_each_token() -> None:
    whole = answer(64)
    for offset in range(1, 4):
        whole.take(made(offset), may_wait=True)
    whole.adopt(whole.link, 2)
    assert tokens([whole.take(made(4), may_wait=True)]) == [(4, [104])]


async def test_failed_answer_sends_all_tokens_before_the_failure() -> None:
    async with running(DecodeStack()) as worker, SessionClient(worker.endpoint) as router:
        worker.runner.hold_after(5)  # two steps for the prompt, then tokens 2 to 4
        start = start_command(1, b"", "", tokens=PROMPT_TOKENS, max_tokens=40, tokens_together=64)
        await router.send(start=start)
        await eventually(worker.runner.stepping.is_set)
        worker.runner.poison.add(1)
        worker.runner.let_go()
        await router.one("failed", 1)
        sent = [token_id for output in router.outputs(1) for token_id in output.token_ids]
        assert sent == [token(0, PROMPT_TOKENS + offset) for offset in range(1, 4)]
        assert [message.WhichOneof("event") for message in router.heard if message.number][-1] == "failed"
        await worker.all_free()
