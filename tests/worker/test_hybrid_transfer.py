"""A block's state goes with its keys and values from prefill to decode: the same tokens as in one engine."""

from pathlib import Path

import pytest

from baton.engine.offline.llm import LLM
from baton.engine.offline.params import SamplingParams
from baton.kvtransfer.description import TransportChoice
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import random_prompt
from tests.fixtures.real_workers import BLOCK_TOKENS, real_pair

pytestmark = pytest.mark.usefixtures("forked_ranks")
LENGTHS = (1, 31, 32, 33, 300)
NEW_TOKENS = 24


@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
async def test_answers_equal_those_of_one_engine(tmp_path: Path, transport: TransportChoice) -> None:
    checkpoint = make_checkpoint(tmp_path / "tiny", "qwen3_5_text", seed=3)
    prompts = [random_prompt(length, seed=1) for length in LENGTHS]
    llm = LLM(str(checkpoint), dtype="float32", kv_memory=1 << 24, quiet=True)
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    expected = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]
    async with real_pair(checkpoint, transport=transport) as pair:
        for attempt_id, prompt in enumerate(prompts, start=1):
            start = await pair.compute(attempt_id, prompt, NEW_TOKENS)
            assert await pair.finish(start) == expected[attempt_id - 1]
            landed = await pair.to_decode.one("landed", attempt_id)
            blocks = -(-len(prompt) // BLOCK_TOKENS)
            assert (landed.transport, landed.bytes) == (transport, blocks * pair.prepared.layout.block_bytes)


async def test_each_rank_sends_its_part_of_a_state_to_its_like(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "tiny", "qwen3_next", seed=3)
    prompts = [random_prompt(length, seed=1) for length in (33, 200)]
    llm = LLM(str(checkpoint), dtype="float32", kv_memory=1 << 24, quiet=True)
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    expected = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]
    async with real_pair(checkpoint, prefill_ranks=2, decode_ranks=2, checksum_share=1.0) as pair:
        for attempt_id, prompt in enumerate(prompts, start=1):
            start = await pair.compute(attempt_id, prompt, NEW_TOKENS)
            assert await pair.finish(start) == expected[attempt_id - 1]
            landed = await pair.to_decode.one("landed", attempt_id)
            assert landed.bytes == -(-len(prompt) // BLOCK_TOKENS) * pair.prepared.layout.block_bytes
