"""Compares answers of a real stack with those of transformers, greedy and in fp32."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from baton.client import AsyncBatonClient, Completion
from tests.fixtures.checkpoints import make_checkpoint

LENGTHS = (1, 31, 32, 33, 100, 700)
NEW_TOKENS = 24
SEED = 5


@dataclass(frozen=True)
class Oracle:
    """Model of transformers with prompts; the first ones have each of LENGTHS."""

    prompts: list[list[int]]
    model: torch.nn.Module
    answers: dict[int, list[int]] = field(default_factory=dict)
    """Answers that were found to be right, by index of their prompt."""

    def expected(self, place: int, answer: list[int]) -> list[int]:
        """Return the right answer to the prompt at that index; fast if it is `answer`."""
        if place not in self.answers:
            expected = greedy(self.model, self.prompts[place], answer)
            if expected != answer:
                return expected
            self.answers[place] = answer
        return self.answers[place]


def make_asked(folder: Path, family: str) -> Path:
    """Make a tiny checkpoint of a family."""
    return make_checkpoint(folder, family, seed=SEED)


def ask_transformers(folder: Path, prompts: int) -> Oracle:
    """Load a checkpoint and draw prompts: one of each length first, then short ones."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    draw = random.Random(SEED)
    lengths = (*LENGTHS, *(draw.choice(LENGTHS[:5]) for _ in range(prompts - len(LENGTHS))))
    asked = [[draw.randrange(3, model.config.vocab_size) for _ in range(length)] for length in lengths]
    return Oracle(asked, model)


def greedy(model: torch.nn.Module, prompt: Sequence[int], answer: Sequence[int], count: int = NEW_TOKENS) -> list[int]:
    """Return `answer` if transformers answers the same with at most `count` tokens, else something different.

    One forward pass over prompt and answer gives the choice after each token; generating would take one pass per token.
    """
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 :]
    chosen: list[int] = logits.argmax(-1)[:count].tolist()
    config: Any = model.generation_config
    ends = config.eos_token_id  # None: no token ends the answer
    last = next((place for place, token in enumerate(chosen) if token == ends), len(chosen))
    return chosen[: last + 1]


async def check_answers(target: str, oracle: Oracle, cache_salt: str = "") -> list[Completion]:
    """Send the prompts of different lengths one by one, then all at once, and compare each answer with transformers."""
    async with AsyncBatonClient(target, timeout_s=120) as baton:

        async def ask(prompt: Sequence[int]) -> Completion:
            return await baton.complete(prompt, max_tokens=NEW_TOKENS, temperature=0.0, cache_salt=cache_salt)

        alone = [await ask(prompt) for prompt in oracle.prompts[: len(LENGTHS)]]
        together = list(await asyncio.gather(*(ask(prompt) for prompt in oracle.prompts)))
    for answers in (tokens_of(alone), tokens_of(together)):
        assert answers == [oracle.expected(place, answer) for place, answer in enumerate(answers)]
    return [*alone, *together]


def tokens_of(answers: Sequence[Completion]) -> list[list[int]]:
    return [list(answer.choices[0].token_ids) for answer in answers]
