"""Adapters through prefill, transfer and decode of real workers, mixed in one batch, against merged weights."""

from pathlib import Path
from typing import Any

import pytest

from baton.process.registry.worker_record import AdapterFolder
from baton.protos import sampling_pb2, session_pb2
from tests.fixtures.adapters import ALL_PROJECTIONS, greedy, make_adapter, merged_model
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import random_prompt
from tests.fixtures.real_workers import real_pair
from tests.fixtures.session_client import eventually

TOKENS = 24
PROMPTS = [random_prompt(length) for length in (70, 20, 33, 64, 90, 7)]
CHOSEN = ["large", "", "small", "small", "large", ""]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "base", "qwen3", seed=6)


@pytest.fixture(scope="module")
def adapters(checkpoint: Path) -> list[AdapterFolder]:
    small = make_adapter(checkpoint.parent / "small", checkpoint, 1, rank=2, targets=("k_proj", "gate_proj"))
    large = make_adapter(checkpoint.parent / "large", checkpoint, 2, rank=9, targets=ALL_PROJECTIONS)
    return [AdapterFolder("small", small), AdapterFolder("large", large)]


@pytest.fixture(scope="module")
def expected(checkpoint: Path, adapters: list[AdapterFolder]) -> list[list[int]]:
    folders = {each.name: each.folder for each in adapters}
    models = {name: merged_model(checkpoint, folders.get(name)) for name in {*CHOSEN}}
    return [greedy(models[name], prompt, TOKENS) for name, prompt in zip(CHOSEN, PROMPTS, strict=True)]


def command(attempt_id: int, prompt: list[int], adapter: str) -> dict[str, Any]:
    return {
        "attempt_id": attempt_id,
        "transfer_id": attempt_id.to_bytes(16, "big"),
        "token_ids": prompt,
        "sampling": sampling_pb2.Sampling(max_tokens=TOKENS, n=1, top_p=1.0),
        "time_left_ms": 20_000,
        "adapter": adapter,
    }


async def test_two_adapters_and_the_base_run_together_on_both_workers(
    checkpoint: Path, adapters: list[AdapterFolder], expected: list[list[int]]
) -> None:
    async with real_pair(checkpoint, adapters=adapters) as pair:
        heard = pair.to_decode
        for attempt_id, (prompt, name) in enumerate(zip(PROMPTS, CHOSEN, strict=True)):
            common = command(attempt_id, prompt, name)
            await pair.to_prefill.send(prefill=session_pb2.Prefill(**common))
            await heard.send(start=session_pb2.Start(**common, prefill_endpoint=pair.prefill_endpoint))
        await eventually(lambda: all(len(heard.tokens(each)) == TOKENS for each in range(len(PROMPTS))))
        assert [heard.tokens(each) for each in range(len(PROMPTS))] == expected


async def test_decode_worker_computes_prompts_with_adapters_itself(
    checkpoint: Path, adapters: list[AdapterFolder], expected: list[list[int]]
) -> None:
    async with real_pair(checkpoint, adapters=adapters) as pair:
        heard = pair.to_decode

        def later(attempt_id: int) -> list[int]:
            return [token_id for output in heard.outputs(attempt_id) for token_id in output.token_ids]

        for attempt_id, (prompt, name) in enumerate(zip(PROMPTS, CHOSEN, strict=True)):
            await heard.send(start=session_pb2.Start(**command(attempt_id, prompt, name)))
        await eventually(lambda: all(len(later(each)) == TOKENS - 1 for each in range(len(PROMPTS))))
        first = [(await heard.one("first_step", each)).outputs[0].token_ids[0] for each in range(len(PROMPTS))]
        assert [[token_id, *later(each)] for each, token_id in enumerate(first)] == expected


async def test_name_that_a_worker_does_not_know_fails_that_request_alone(
    checkpoint: Path, adapters: list[AdapterFolder], expected: list[list[int]]
) -> None:
    async with real_pair(checkpoint, adapters=adapters[:1]) as pair:
        await pair.to_prefill.send(prefill=session_pb2.Prefill(**command(1, [5, 6], "large")))
        await eventually(lambda: pair.to_prefill.about("failed", 1))
        [failed] = pair.to_prefill.about("failed", 1)
        assert failed.reason == session_pb2.FAILURE_REASON_INVALID
        assert "adapter 'large' is not loaded" in failed.message
        assert await pair.finish(await pair.compute(2, PROMPTS[2], TOKENS, adapter="small")) == expected[2]
