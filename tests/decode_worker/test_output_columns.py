"""Tokens of a step as columns of one message, for routers that read them."""

from typing import Any

import pytest

from baton.protos import session_pb2, versions_pb2
from baton.router.fleet.wire import attempt_events
from baton.router.types.events import SequenceEnd, SequenceOutput
from tests.fixtures.held_runner import token
from tests.fixtures.session_client import SessionClient, eventually
from tests.fixtures.worker_stack import DecodeStack, running, start_command

PROMPT_TOKENS, MAX_TOKENS = 10, 5


@pytest.mark.parametrize(
    ("protocol", "fields", "in_columns"),
    [(2, {}, 2), (1, {}, 0), (2, {"sampling": {"logprobs": 0}}, 0), (2, {"tokens_together": 2}, 0)],
)
async def test_single_tokens_are_sent_in_columns_from_protocol_2_on(
    protocol: int, fields: dict[str, Any], in_columns: int
) -> None:
    async with running(DecodeStack()) as stack:
        router = SessionClient(stack.endpoint)
        router.versions = versions_pb2.Versions(release="0.2.0", protocol=protocol, oldest_protocol=1)
        async with router:
            start = start_command(1, b"", "", tokens=PROMPT_TOKENS, max_tokens=MAX_TOKENS, **fields)
            await router.send(start=start)
            await eventually(lambda: any(output.end for output in router.outputs(1)))
            steps = router.of_kind("step_outputs")
            assert sum(len(step.token_ids) for step in steps) == in_columns
            found = [output for step in steps for output in events(step)]
            token_ids = [token_id for output in found for token_id in output.token_ids]
            assert token_ids == [token(0, PROMPT_TOKENS + offset) for offset in range(1, MAX_TOKENS)]
            assert [output.offset for output in found][:2] == [1, 2]
            assert found[-1].end is SequenceEnd.LENGTH


async def test_router_that_opens_a_new_link_still_gets_columns() -> None:
    async with running(DecodeStack()) as stack:
        before, after = SessionClient(stack.endpoint), SessionClient(stack.endpoint)
        after.router_id = before.router_id
        before.versions = after.versions = versions_pb2.Versions(release="0.2.0", protocol=2, oldest_protocol=1)
        async with before:
            pass
        async with after:
            assert after.welcome is not None and not after.welcome.resumed
            await after.send(start=start_command(1, b"", "", tokens=PROMPT_TOKENS, max_tokens=MAX_TOKENS))
            await eventually(lambda: any(output.end for output in after.outputs(1)))
            assert sum(len(step.token_ids) for step in after.of_kind("step_outputs")) == 2


def events(step: session_pb2.StepOutputs) -> list[SequenceOutput]:
    found = attempt_events(session_pb2.ConnectResponse(step_outputs=step), "h:1")
    return [event for event in found if isinstance(event, SequenceOutput)]
