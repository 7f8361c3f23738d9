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


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> Layout:
    return LAYOUTS[request.param]


@pytest.fixture(scope="module")
def running(oracle: Oracle, layout: Layout, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    decode = len(layout.transports)
    yield from run(make_stack(folder, oracle.folder, layout.prefill, decode, transports=layout.transports))


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


async def test_answers_equal_transformers_alone_and_together(running: Stack, oracle: Oracle, layout: Layout) -> None:
    alone = await complete_all(running.target, oracle.prompts[: len(LENGTHS)], at_once=False)
    together = await complete_all(running.target, oracle.prompts, at_once=True)

    assert [list(done.choices[0].token_ids) for done in alone] == oracle.answers[: len(LENGTHS)]
    assert [list(done.choices[0].token_ids) for done in together] == oracle.answers
    check_who_took_part(running, [*alone, *together], layout)
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
