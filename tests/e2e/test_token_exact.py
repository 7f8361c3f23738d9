"""Greedy answers through real processes equal transformers' token for token, in fp32."""

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from client import AsyncBatonClient, Completion
from tests.e2e.conftest import run
from tests.e2e.stack import Stack, make_stack
from tests.fixtures.checkpoints import FAMILIES, make_checkpoint

LENGTHS = (1, 31, 32, 33, 100, 700)
NEW_TOKENS = 24
TOGETHER = 32
SEED = 5


@dataclass(frozen=True)
class Oracle:
    """A checkpoint with prompts and what transformers answers to them."""

    folder: Path
    prompts: list[list[int]]
    answers: list[list[int]]


@pytest.fixture(scope="module", params=FAMILIES)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = make_checkpoint(tmp_path_factory.mktemp("model") / request.param, request.param, seed=SEED)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    draw = random.Random(SEED)
    lengths = (*LENGTHS, *(draw.choice(LENGTHS[:5]) for _ in range(TOGETHER - len(LENGTHS))))
    prompts = [[draw.randrange(3, model.config.vocab_size) for _ in range(length)] for length in lengths]
    return Oracle(folder, prompts, [generate(model, prompt) for prompt in prompts])


@pytest.fixture(scope="module", params=["shared_memory", "grpc"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=[(1, 1), (2, 2)], ids=["1P1D", "2P2D"])
def running(
    request: pytest.FixtureRequest, oracle: Oracle, transport: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    prefill, decode = request.param
    yield from run(make_stack(tmp_path_factory.mktemp("stack"), oracle.folder, prefill, decode, transport))


def generate(model: torch.nn.Module, prompt: Sequence[int]) -> list[int]:
    tokens = torch.tensor([list(prompt)])
    with torch.inference_mode():
        answer = model.generate(  # type: ignore[operator]
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
    return [int(token) for token in answer[0, len(prompt) :]]


async def complete_all(target: str, prompts: Sequence[Sequence[int]], at_once: bool) -> list[Completion]:
    async with AsyncBatonClient(target, timeout_s=120) as baton:
        calls = [baton.complete(prompt, max_tokens=NEW_TOKENS, temperature=0.0) for prompt in prompts]
        if at_once:
            return list(await asyncio.gather(*calls))
        return [await call for call in calls]


async def test_answers_equal_transformers_alone_and_together(running: Stack, oracle: Oracle, transport: str) -> None:
    alone = await complete_all(running.target, oracle.prompts[: len(LENGTHS)], at_once=False)
    together = await complete_all(running.target, oracle.prompts, at_once=True)

    assert [list(done.choices[0].token_ids) for done in alone] == oracle.answers[: len(LENGTHS)]
    assert [list(done.choices[0].token_ids) for done in together] == oracle.answers
    check_two_processes_took_part(running, [*alone, *together], transport)
    running.wait_idle(within_s=2.0)


def check_two_processes_took_part(running: Stack, answers: Sequence[Completion], transport: str) -> None:
    """Every answer was prefilled and decoded by processes that we started, and its KV came by the way asked for."""
    pids = {
        role: {p.pid for name, p in running.processes.items() if name.startswith(role)}
        for role in ("prefill", "decode")
    }
    for answer in answers:
        assert answer.timings.prefill_pid in pids["prefill"]
        assert answer.timings.decode_pid in pids["decode"]
        assert answer.timings.transport == transport
    assert any(answer.timings.transfer_bytes > 0 for answer in answers)
    assert {answer.timings.decode_pid for answer in answers} == pids["decode"], "a decode worker got no work"
    assert {answer.timings.prefill_pid for answer in answers} == pids["prefill"], "a prefill worker got no work"
