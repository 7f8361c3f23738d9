"""Greedy answers of a real stack equal those of transformers token for token, in fp32."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.client import Completion
from tests.e2e.conftest import run
from tests.e2e.oracle import Oracle, ask_transformers, check_answers, make_asked
from tests.e2e.stack import Stack, make_router, make_stack

FAMILIES = ("llama", "gemma3_text", "gemma4_text")  # tests/engine/test_exactness.py has all families
TOGETHER = 32
TRANSPORTS = {"decode-0": "shared_memory", "decode-1": "grpc"}
PAIRS = [("prefill-0", "decode-0"), ("prefill-1", "decode-1")]
EACH_BY_PREFILL = ("--local-prefill-tokens", "0")  # also prompts whose prefix the decode worker has cached


@dataclass(frozen=True)
class Served:
    """2P+2D with one decode worker for each transport, and the expected answers."""

    stack: Stack
    oracle: Oracle


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Stack with a model of the family that is the parameter."""
    model = make_asked(tmp_path_factory.mktemp("model") / request.param, request.param)
    stack = make_stack(
        tmp_path_factory.mktemp("stack"), model, 2, 2, transports=TRANSPORTS, router_flags=EACH_BY_PREFILL
    )
    try:
        stack.start()
        oracle = ask_transformers(model, TOGETHER)  # meanwhile the stack starts
        stack.wait_ready()
        yield Served(stack, oracle)
    finally:
        stack.stop()


@pytest.mark.parametrize("served", FAMILIES, indirect=True)
async def test_answers_equal_transformers_alone_and_together(served: Served) -> None:
    answers = await check_answers(served.stack.target, served.oracle)
    check_who_took_part(served.stack, answers, {*served.stack.processes} - {"router"})
    served.stack.wait_idle()


@pytest.mark.parametrize("served", ["llama"], indirect=True)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: TRANSPORTS[pair[1]])
async def test_answers_of_one_pair_by_one_transport_equal_transformers(
    served: Served, pair: tuple[str, str], tmp_path: Path
) -> None:
    """A router of its own has one pair of the stack's workers; a new cache salt makes sure that nothing is cached."""
    for alone in run(make_router(tmp_path, served.stack, pair, EACH_BY_PREFILL), workers=2):
        answers = await check_answers(alone.target, served.oracle, cache_salt=pair[1])
        check_who_took_part(served.stack, answers, {*pair})
        alone.wait_idle()


def check_who_took_part(stack: Stack, answers: Sequence[Completion], workers: set[str]) -> None:
    """Check that each answer came from this pair, and its KV by the expected transport."""
    names = {process.pid: name for name, process in stack.processes.items()}
    transported_bytes = {TRANSPORTS[name]: 0 for name in workers if name in TRANSPORTS}
    for answer in answers:
        assert names[answer.timings.prefill_pid].startswith("prefill")
        decode = names[answer.timings.decode_pid]
        assert answer.timings.transport == TRANSPORTS[decode]
        transported_bytes[answer.timings.transport] += answer.timings.transfer_bytes
    assert all(transported_bytes.values()), transported_bytes
    took_part = {names[pid] for answer in answers for pid in (answer.timings.prefill_pid, answer.timings.decode_pid)}
    assert took_part == workers, "a worker got no work, or one that was not asked"
