"""What transformers answers, greedy and in fp32: the measure for what comes through real processes."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from baton.client import AsyncBatonClient, Completion
from tests.fixtures.checkpoints import make_checkpoint

LENGTHS = (1, 31, 32, 33, 100, 700)
NEW_TOKENS = 24
SEED = 5


@dataclass(frozen=True)
class Oracle:
    """Prompts, one of each length first, and what transformers answers to them."""

    prompts: list[list[int]]
    answers: list[list[int]]


def make_asked(folder: Path, family: str) -> Path:
    """The tiny checkpoint that is asked."""
    return make_checkpoint(folder, family, seed=SEED)


def ask_transformers(folder: Path, prompts: int) -> Oracle:
    """Of the checkpoint in `folder`. The prompts beyond one of each length are short ones."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    draw = random.Random(SEED)
    lengths = (*LENGTHS, *(draw.choice(LENGTHS[:5]) for _ in range(prompts - len(LENGTHS))))
    asked = [[draw.randrange(3, model.config.vocab_size) for _ in range(length)] for length in lengths]
    return Oracle(asked, [generate(model, prompt) for prompt in asked])


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


async def check_answers(target: str, oracle: Oracle, cache_salt: str = "") -> list[Completion]:
    """The prompts of different lengths one after another, then all at once: each is answered as transformers does."""
    async with AsyncBatonClient(target, timeout_s=120) as baton:

        async def ask(prompt: Sequence[int]) -> Completion:
            return await baton.complete(prompt, max_tokens=NEW_TOKENS, temperature=0.0, cache_salt=cache_salt)

        alone = [await ask(prompt) for prompt in oracle.prompts[: len(LENGTHS)]]
        together = list(await asyncio.gather(*(ask(prompt) for prompt in oracle.prompts)))
    assert tokens_of(alone) == oracle.answers[: len(LENGTHS)]
    assert tokens_of(together) == oracle.answers
    return [*alone, *together]


def tokens_of(answers: Sequence[Completion]) -> list[list[int]]:
    return [list(answer.choices[0].token_ids) for answer in answers]
