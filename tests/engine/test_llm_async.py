"""AsyncLLM: answers grow, are given up, and end with the engine."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from baton.engine import LLM, AsyncLLM, RequestOutput, SamplingParams
from baton.engine.runner.thread import EngineStopped
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.held_engine import held_after
from tests.fixtures.waiting import eventually

WAIT_S = 20.0
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "quiet": True,
    "kv_cache_memory_bytes": 4 << 20,
    "max_model_len": 512,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "qwen2", seed=11)


@pytest.fixture
async def llm(tiny: Path) -> AsyncIterator[AsyncLLM]:
    engine = AsyncLLM(str(tiny), **OPTIONS)
    yield engine
    await idle(engine)
    assert engine.shutdown()


async def idle(engine: AsyncLLM) -> None:
    await eventually(lambda: not engine._engine.scheduler.has_work)
    assert engine._engine.scheduler.pool.counts.held == 0


def params(**given: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 20, "ignore_eos": True, **given})


async def collect(engine: AsyncLLM, prompt: Any, **given: Any) -> list[RequestOutput]:
    async with asyncio.timeout(WAIT_S):
        return [output async for output in engine.generate(prompt, params(**given))]


async def test_answers_grow_and_end_as_offline(llm: AsyncLLM, tiny: Path) -> None:
    prompts = [[5 + number, 6, 7] for number in range(5)]
    streams = await asyncio.gather(*(collect(llm, prompt, n=2) for prompt in prompts))
    expected = LLM(str(tiny), **OPTIONS).generate(prompts, params(n=2), use_tqdm=False)
    for outputs, whole in zip(streams, expected, strict=True):
        assert [choice.token_ids for choice in outputs[-1].outputs] == [choice.token_ids for choice in whole.outputs]
        assert [choice.text for choice in outputs[-1].outputs] == [choice.text for choice in whole.outputs]
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        for before, after in itertools.pairwise(outputs):
            assert after.outputs[0].text.startswith(before.outputs[0].text)


async def test_stop_string_is_never_shown_in_part(llm: AsyncLLM) -> None:
    [*_, free] = await collect(llm, [5, 6, 7])
    stop = free.outputs[0].text[8:12]
    outputs = await collect(llm, [5, 6, 7], stop=stop)
    final = free.outputs[0].text[: free.outputs[0].text.index(stop)]
    assert outputs[-1].outputs[0].text == final
    assert all(final.startswith(output.outputs[0].text) for output in outputs)


async def test_closed_iterator_frees_its_blocks(llm: AsyncLLM) -> None:
    stream = llm.generate([5, 6, 7], params(max_tokens=500))
    with held_after(llm._thread, steps=1):
        async with asyncio.timeout(WAIT_S):
            await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        await idle(llm)


async def test_abort_ends_the_iterator(llm: AsyncLLM) -> None:
    outputs = []
    async with asyncio.timeout(WAIT_S):
        with held_after(llm._thread, steps=1):
            async for output in llm.generate([5, 6, 7], params(max_tokens=500), request_id="mine"):
                outputs.append(output)
                await llm.abort("mine")
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert outputs[-1].request_id == "mine"


async def test_too_long_prompt_is_rejected(llm: AsyncLLM) -> None:
    with pytest.raises(ValueError, match="at most 511"):
        await collect(llm, [5] * 512)


async def test_shutdown_ends_waiting_requests(tiny: Path) -> None:
    engine = AsyncLLM(str(tiny), **OPTIONS)
    stream = engine.generate([5, 6, 7], params(max_tokens=500))
    async with asyncio.timeout(WAIT_S):
        with held_after(engine._thread, steps=1):
            await anext(stream)
            assert await asyncio.to_thread(engine.shutdown)
        with pytest.raises(EngineStopped):
            while True:
                await anext(stream)
