"""A reranker of token logits: what its worker is asked for, and what becomes of the logits."""

import math
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.protos import baton_pb2, session_pb2
from baton.router.fleet.wire import versions_message
from baton.versions import OWN
from tests.fixtures.poolers import write_logit_score
from tests.router.conftest import READY_S, Stack
from tests.router.fake_worker import FakePair
from tests.router.tokenizers_for_tests import byte_level

TRUE, FALSE = 7, 9
TEMPLATE = "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}[judge]"


@pytest.fixture
def stopped_pair(stopped_pair: FakePair, tmp_path: Path) -> FakePair:
    folder = write_logit_score(tmp_path / "tiny", TRUE, FALSE)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "config.json").write_text("{}")
    stopped_pair.prefill.info.versions.CopyFrom(versions_message(OWN))
    return stopped_pair


async def test_query_and_document_are_rendered_and_logits_become_a_probability(stack: Stack) -> None:
    await stack.ready()
    commands: list[Any] = []

    def judge(command: session_pb2.ConnectRequest) -> None:
        if command.WhichOneof("command") == "prefill":
            commands.append(command.prefill)
            first_step = session_pb2.FirstStep(attempt_id=command.prefill.attempt_id, pooled=[2.0, 0.5])
            stack.prefill.say(first_step=first_step)

    stack.prefill.on_command = judge
    request = baton_pb2.ScoreRequest(queries=["who?"], documents=["me"])
    made = await stack.stub.Score(request, timeout=READY_S)
    assert list(made.scores) == [pytest.approx(1 / (1 + math.exp(-1.5)))]
    (command,) = commands
    assert byte_level().decode(list(command.token_ids)) == "[query]who?[document]me[judge]"
    assert list(command.pooling.head_token_ids) == [TRUE, FALSE]
    assert command.pooling.kind == session_pb2.POOLING_KIND_LAST


async def test_reranker_makes_no_vectors(stack: Stack) -> None:
    await stack.ready()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        inputs = [baton_pb2.EmbedInput(text="a")]
        await stack.stub.Embed(baton_pb2.EmbedRequest(inputs=inputs), timeout=READY_S)
    assert refused.value.details() == "model: tiny is a reranker without vectors; request scores"
