"""Workers of different tensor-parallel degrees: KV that ranks wrote lands where one rank reads it."""

import mmap
from pathlib import Path

import pytest
import torch

from baton.engine.offline.llm import LLM
from baton.engine.offline.params import SamplingParams
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import random_prompt
from tests.fixtures.real_workers import BLOCK_TOKENS, real_pair

pytestmark = pytest.mark.usefixtures("forked_ranks")
LENGTHS = (1, 32, 33, 200)
NEW_TOKENS = 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("parallel") / "tiny", "llama", seed=22)


async def test_quantised_kv_of_two_ranks_is_read_by_one(checkpoint: Path) -> None:
    prompts = [random_prompt(length, seed=1) for length in LENGTHS]
    llm = LLM(str(checkpoint), dtype="float32", kv_cache_dtype="int8", kv_memory=1 << 22, quiet=True)
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    expected = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]
    async with real_pair(checkpoint, "int8", "grpc", prefill_ranks=2) as pair:
        memory = pair.prefill._host.memory
        assert memory.shared is not None and memory.description.shared_memory is None
        with pytest.raises(PermissionError):
            mmap.mmap(memory.shared.handle.fd, 4096)
        for attempt_id, prompt in enumerate(prompts, start=1):
            start = await pair.compute(attempt_id, prompt, NEW_TOKENS)
            assert await pair.finish(start) == expected[attempt_id - 1]
            landed = await pair.to_decode.one("landed", attempt_id)
            blocks = -(-len(prompt) // BLOCK_TOKENS)
            assert landed.bytes == blocks * pair.prepared.layout.block_bytes


async def test_rows_of_latent_attention_that_one_rank_wrote_are_copied_to_each_of_two(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "deepseek_v3", seed=22)
    prompts = [random_prompt(length, seed=1) for length in (33, 200)]
    llm = LLM(str(folder), dtype="float32", kv_memory=1 << 22, quiet=True)
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    expected = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]
    async with real_pair(folder, decode_ranks=2, checksum_share=1.0) as pair:
        memory = pair.decode._host.memory
        for attempt_id, prompt in enumerate(prompts, start=1):
            start = await pair.compute(attempt_id, prompt, NEW_TOKENS)
            assert await pair.finish(start) == expected[attempt_id - 1]
            landed = await pair.to_decode.one("landed", attempt_id)
            assert landed.bytes == -(-len(prompt) // BLOCK_TOKENS) * pair.prepared.layout.block_bytes
        assert torch.equal(memory.first_part, memory.copies[0]) and memory.first_part.any()
