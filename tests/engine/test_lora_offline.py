"""`LLM` with adapters per request: mixed in one batch they answer as merged weights in transformers do."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from baton.engine import LLM, AsyncLLM, LoRARequest, SamplingParams
from baton.engine.config.model_config import ModelError
from tests.fixtures.adapters import ALL_PROJECTIONS, greedy, make_adapter, merged_model
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import random_prompt

TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "quiet": True,
    "max_num_batched_tokens": 50,
    "kv_cache_memory_bytes": 8 << 20,
    "max_model_len": 256,
    "enable_lora": True,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "base", "qwen2", seed=4)


@pytest.fixture(scope="module")
def loras(checkpoint: Path) -> list[LoRARequest]:
    small = make_adapter(checkpoint.parent / "small", checkpoint, 1, rank=3, targets=("q_proj", "v_proj"))
    large = make_adapter(checkpoint.parent / "large", checkpoint, 2, rank=12, targets=ALL_PROJECTIONS)
    return [LoRARequest("small", 1, str(small)), LoRARequest("large", 2, str(large))]


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return LLM(str(checkpoint), max_loras=2, max_lora_rank=12, **OPTIONS)


def answers(llm: LLM, prompts: list[list[int]], chosen: Any) -> list[list[int]]:
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=chosen)
    return [output.outputs[0].token_ids for output in outputs]


def test_base_and_adapters_in_one_batch_equal_merged_weights(
    llm: LLM, checkpoint: Path, loras: list[LoRARequest]
) -> None:
    chosen = [None, *loras] * 4
    prompts = [random_prompt(10 + 9 * index) for index in range(len(chosen))]
    expected = {lora: merged_model(checkpoint, lora and Path(lora.lora_path)) for lora in (None, *loras)}
    wanted = [greedy(expected[lora], prompt, TOKENS) for prompt, lora in zip(prompts, chosen, strict=True)]
    assert answers(llm, prompts, chosen) == wanted
    assert len({tuple(each) for each in answers(llm, [prompts[5]] * 3, chosen[:3])}) == 3


def test_one_adapter_for_all_prompts(llm: LLM, loras: list[LoRARequest]) -> None:
    prompts = [random_prompt(20), random_prompt(21)]
    assert answers(llm, prompts, loras[1]) == answers(llm, prompts, [loras[1], loras[1]])


def test_blocks_are_shared_by_one_adapter_and_by_none_other(llm: LLM, loras: list[LoRARequest]) -> None:
    prompt = random_prompt(100, seed=3)
    again = [LoRARequest("another name", 7, loras[0].lora_path), None, loras[1]]
    cached = []
    for chosen in (None, *loras, *again):
        [output] = llm.generate([prompt], GREEDY, use_tqdm=False, lora_request=chosen)
        cached.append(output.num_cached_tokens)
    assert cached == [0, 0, 0, 96, 96, 96]


def test_adapter_needs_an_engine_for_adapters(checkpoint: Path, loras: list[LoRARequest]) -> None:
    plain = LLM(str(checkpoint), **{**OPTIONS, "enable_lora": False})
    with pytest.raises(ValueError, match="enable_lora"):
        plain.generate([[5, 6]], GREEDY, use_tqdm=False, lora_request=loras[0])


def test_rank_above_the_limit_is_refused(checkpoint: Path, loras: list[LoRARequest]) -> None:
    limited = LLM(str(checkpoint), max_lora_rank=8, **OPTIONS)
    with pytest.raises(ValueError, match="rank of 'large' is 12"):
        limited.generate([[5, 6]], GREEDY, use_tqdm=False, lora_request=loras[1])


def test_adapter_of_another_model_is_refused_before_anything_runs(llm: LLM, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", "llama", num_hidden_layers=6)
    stray = make_adapter(tmp_path / "stray", other, 1, rank=2, targets=("q_proj",))
    with pytest.raises(ModelError, match=r"'stray' changes model\.layers\.4"):
        llm.generate([[5, 6]], GREEDY, use_tqdm=False, lora_request=LoRARequest("stray", 3, str(stray)))
    assert not llm.generate([], GREEDY, use_tqdm=False)


def test_as_many_adapters_as_prompts(llm: LLM, loras: list[LoRARequest]) -> None:
    with pytest.raises(ValueError, match="1 lora_requests for 2 prompts"):
        llm.generate([[5, 6], [7]], GREEDY, use_tqdm=False, lora_request=[loras[0]])


async def test_streams_with_adapters_equal_the_batch(checkpoint: Path, llm: LLM, loras: list[LoRARequest]) -> None:
    chosen = [None, *loras]
    prompts = [random_prompt(30 + index) for index in range(3)]
    engine = AsyncLLM(str(checkpoint), **OPTIONS)

    async def answer(prompt: list[int], lora: LoRARequest | None) -> list[int]:
        last: list[int] = []
        async for output in engine.generate(prompt, GREEDY, lora_request=lora):
            last = output.outputs[0].token_ids
        return last

    try:
        streamed = await asyncio.gather(*(answer(*each) for each in zip(prompts, chosen, strict=True)))
    finally:
        assert engine.shutdown()
    assert streamed == answers(llm, prompts, chosen)
