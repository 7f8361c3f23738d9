"""Quantised KV over both ways from prefill to decode: the same tokens as in one engine, and fewer bytes."""

from pathlib import Path

import pytest

from baton.engine.offline.llm import LLM
from baton.engine.offline.params import SamplingParams
from baton.kvtransfer.description import TransportChoice
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import random_prompt
from tests.fixtures.real_workers import BLOCK_TOKENS, real_pair

LENGTHS = (1, 31, 32, 33, 100, 300)
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("quantised") / "tiny", "llama", seed=22)


@pytest.mark.parametrize(
    ("kv_cache_dtype", "transport"), [("int8", "shared_memory"), ("int8", "grpc"), ("fp8", "shared_memory")]
)
async def test_answers_equal_those_of_one_engine(
    checkpoint: Path, kv_cache_dtype: str, transport: TransportChoice
) -> None:
    prompts = [random_prompt(length, seed=1) for length in LENGTHS]
    llm = LLM(str(checkpoint), dtype="float32", kv_cache_dtype=kv_cache_dtype, kv_memory=1 << 22, quiet=True)
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    expected = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]
    async with real_pair(checkpoint, kv_cache_dtype, transport) as pair:
        for attempt_id, prompt in enumerate(prompts, start=1):
            start = await pair.compute(attempt_id, prompt, NEW_TOKENS)
            assert await pair.finish(start) == expected[attempt_id - 1]
            landed = await pair.to_decode.one("landed", attempt_id)
            blocks = -(-len(prompt) // BLOCK_TOKENS)
            assert (landed.transport, landed.bytes) == (transport, blocks * pair.prepared.layout.block_bytes)
