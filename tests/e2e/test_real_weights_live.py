"""Published weights (SmolLM2-135M-Instruct, Q4_1) behind a router: answers over killed workers, and cached prompts."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.client import AsyncBatonClient, Delta, RetryPolicy
from tests.e2e.conftest import run
from tests.e2e.stack import Stack, make_stack
from tests.fixtures.real_models import real_model

TEXT = (Path(__file__).parents[2] / "LICENSE").read_text()[:600]
TOKENS, KILLED_AFTER = 120, 10


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    yield from run(make_stack(tmp_path_factory.mktemp("real"), real_model("smollm2")))


async def answer(stack: Stack, victims: tuple[str, ...] = ()) -> list[int]:
    """Return the tokens of a greedy answer in whose middle `victims` are killed and started again."""
    tokens: list[int] = []
    waiting = list(victims)
    async with AsyncBatonClient(stack.target, retry=RetryPolicy(attempts=1)) as baton:
        async for event in baton.generate(TEXT, max_tokens=TOKENS, temperature=0.0, ignore_eos=True):
            tokens += event.token_ids if isinstance(event, Delta) else ()
            while len(tokens) >= KILLED_AFTER and waiting:
                victim = stack.processes[waiting.pop()]
                victim.kill()
                victim.start()
    assert not waiting
    return tokens


async def test_answer_is_the_same_over_killed_workers(smollm2: Stack) -> None:
    undisturbed = await answer(smollm2)
    assert len(undisturbed) == TOKENS
    assert await answer(smollm2, ("decode-0", "prefill-0")) == undisturbed
    await asyncio.to_thread(smollm2.wait_ready)
    assert await answer(smollm2) == undisturbed
    await asyncio.to_thread(smollm2.wait_idle)


async def test_repeated_prompt_is_a_cache_hit(smollm2: Stack) -> None:
    async with AsyncBatonClient(smollm2.target) as baton:
        first = await baton.complete(TEXT, max_tokens=8, temperature=0.0)
        again = await baton.complete(TEXT, max_tokens=8, temperature=0.0)
    assert again.choices[0].token_ids == first.choices[0].token_ids
    assert again.usage.cached_tokens >= again.usage.prompt_tokens // 2 > 0
