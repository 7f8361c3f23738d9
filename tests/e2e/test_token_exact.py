"""Greedy answers through real processes equal transformers' token for token, in fp32."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from client import Completion
from tests.e2e.conftest import run
from tests.e2e.oracle import Oracle, ask_transformers, check_answers
from tests.e2e.stack import Stack, make_stack

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
TOGETHER = 32


@dataclass(frozen=True)
class Layout:
    """How many workers, and by which transport each decode worker is to be served."""

    prefill: int
    transports: dict[str, str]


LAYOUTS = {
    "1P1D shared_memory": Layout(1, {"decode-0": "shared_memory"}),
    "1P1D grpc": Layout(1, {"decode-0": "grpc"}),
    "2P2D both": Layout(2, {"decode-0": "shared_memory", "decode-1": "grpc"}),
}


CASES = [("llama", "1P1D shared_memory"), ("llama", "1P1D grpc"), *((family, "2P2D both") for family in FAMILIES)]


@pytest.fixture(scope="module", params=CASES, ids=" ".join)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    family, layout = request.param
    return family, layout


@pytest.fixture(scope="module")
def oracle(case: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return ask_transformers(tmp_path_factory.mktemp("model") / case[0], case[0], TOGETHER)


@pytest.fixture(scope="module")
def layout(case: tuple[str, str]) -> Layout:
    return LAYOUTS[case[1]]


@pytest.fixture(scope="module")
def running(oracle: Oracle, layout: Layout, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Every prompt goes over a prefill worker, also one whose beginning decode has."""
    stack = make_stack(
        tmp_path_factory.mktemp("stack"),
        oracle.folder,
        layout.prefill,
        len(layout.transports),
        transports=layout.transports,
        router_flags=["--local-prefill-tokens", "0"],
    )
    yield from run(stack)


async def test_answers_equal_transformers_alone_and_together(running: Stack, oracle: Oracle, layout: Layout) -> None:
    answers = await check_answers(running.target, oracle)
    check_who_took_part(running, answers, layout)
    running.wait_idle(within_s=2.0)


def check_who_took_part(running: Stack, answers: Sequence[Completion], layout: Layout) -> None:
    """Every answer was prefilled and decoded by processes that we started, and its KV came by the way asked for."""
    names = {process.pid: name for name, process in running.processes.items()}
    transported_bytes = dict.fromkeys(layout.transports.values(), 0)
    for answer in answers:
        assert names[answer.timings.prefill_pid].startswith("prefill")
        decode = names[answer.timings.decode_pid]
        assert answer.timings.transport == layout.transports[decode]
        transported_bytes[answer.timings.transport] += answer.timings.transfer_bytes
    assert all(transported_bytes.values()), transported_bytes
    took_part = {names[pid] for answer in answers for pid in (answer.timings.prefill_pid, answer.timings.decode_pid)}
    assert took_part == set(names.values()) - {"router"}, "a worker got no work"
