"""In a second turn with a short question, the decode worker that has the first turn computes the rest itself."""

import random
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from baton.client import AsyncBatonClient
from tests.e2e.oracle import NEW_TOKENS, greedy
from tests.e2e.stack import Stack

BLOCK = 32
PROMPT, QUESTION = 75, 10  # tokens; with the answer the first turn completes three blocks


async def test_short_rest_is_computed_at_the_cache(stack: Stack, tiny_llama: Path) -> None:
    draw = random.Random(75)
    prompt, question = ([draw.randrange(3, 500) for _ in range(length)] for length in (PROMPT, QUESTION))
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    async with AsyncBatonClient(stack.target, timeout_s=30) as baton:
        first = await baton.complete(prompt, max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
        conversation = [*prompt, *first.choices[0].token_ids, *question]
        second = await baton.complete(conversation, max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)

    for asked, answer in ((prompt, first), (conversation, second)):
        tokens = list(answer.choices[0].token_ids)
        assert tokens == greedy(model, asked, tokens)
    assert first.timings.prefill_pid != first.timings.decode_pid
    assert second.timings.prefill_pid == second.timings.decode_pid == first.timings.decode_pid
    assert second.usage.cached_tokens == (PROMPT + NEW_TOKENS - 1) // BLOCK * BLOCK  # the last token has no KV
