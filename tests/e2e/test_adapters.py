"""Adapters on a real stack: selected by model name, mixed in one batch, and equal to merged weights."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.client import AsyncBatonClient, ModelNotFound
from tests.e2e.conftest import run
from tests.e2e.stack import Stack, make_stack
from tests.fixtures.adapters import ALL_PROJECTIONS, greedy, make_adapter, merged_model
from tests.fixtures.paged import random_prompt

TOKENS = 16


@pytest.fixture(scope="module")
def adapters(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "small": make_adapter(folder / "small", tiny_llama, 1, rank=2, targets=("q_proj", "down_proj")),
        "team/large": make_adapter(folder / "large", tiny_llama, 2, rank=9, targets=ALL_PROJECTIONS),
    }


@pytest.fixture(scope="module")
def adapted(tiny_llama: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    flags = [part for name, folder in adapters.items() for part in ("--adapter", f"{name}={folder}")]
    yield from run(
        make_stack(tmp_path_factory.mktemp("stack"), tiny_llama, worker_flags=[*flags, "--dtype", "float32"])
    )


async def test_requests_with_and_without_adapters_answer_as_merged_weights(
    adapted: Stack, tiny_llama: Path, adapters: dict[str, Path]
) -> None:
    chosen = ["", *adapters] * 3
    prompts = [random_prompt(30 + 11 * index) for index in range(len(chosen))]
    models = {name: merged_model(tiny_llama, adapters.get(name)) for name in {*chosen}}
    wanted = [greedy(models[name], prompt, TOKENS) for name, prompt in zip(chosen, prompts, strict=True)]
    async with AsyncBatonClient(adapted.target) as client:
        for _ in range(2):  # the second time from the prefix cache
            answers = await asyncio.gather(
                *(
                    client.complete(prompt, model=name, max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
                    for name, prompt in zip(chosen, prompts, strict=True)
                )
            )
            assert [answer.choices[0].token_ids for answer in answers] == [tuple(each) for each in wanted]
            assert [answer.model for answer in answers] == [name or tiny_llama.name for name in chosen]
        cached = [answer.usage.cached_tokens for answer in answers]
    assert cached == [(len(prompt) - 1) // 32 * 32 for prompt in prompts]
    adapted.wait_idle()


async def test_one_prompt_under_three_names_shares_no_block(adapted: Stack, adapters: dict[str, Path]) -> None:
    prompt = random_prompt(150, seed=9)
    async with AsyncBatonClient(adapted.target) as client:
        for name in ("", *adapters):
            answer = await client.complete(prompt, model=name, max_tokens=2, temperature=0.0)
            assert answer.usage.cached_tokens == 0


async def test_adapters_are_listed_and_unknown_ones_not_found(adapted: Stack, tiny_llama: Path) -> None:
    async with AsyncBatonClient(adapted.target) as client:
        models = await client.models()
        with pytest.raises(ModelNotFound, match="medium"):
            await client.complete([5, 6, 7], model="medium", max_tokens=2)
    base = tiny_llama.name
    assert [(model.name, model.parent) for model in models] == [(base, ""), ("small", base), ("team/large", base)]
