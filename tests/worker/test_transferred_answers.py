"""Prompts that a prefill worker computes and a decode worker answers: the tokens of one engine, whatever its KV is."""

import mmap
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.offline.llm import LLM
from baton.engine.offline.params import SamplingParams
from baton.kvtransfer.description import TransportChoice
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import random_prompt
from tests.fixtures.real_workers import BLOCK_TOKENS, RealPair, real_pair

pytestmark = pytest.mark.usefixtures("forked_ranks")
AROUND_A_BLOCK = (1, 31, 32, 33, 200)
NEW_TOKENS = 16


@asynccontextmanager
async def answering_pair(
    folder: Path, lengths: Sequence[int], kv_cache_dtype: str = "auto", **options: Any
) -> AsyncIterator[RealPair]:
    """Yield workers that have answered prompts of these lengths as one engine does, and moved no byte too many."""
    prompts = [random_prompt(length, seed=1) for length in lengths]
    llm = LLM(str(folder), dtype="float32", kv_cache_dtype=kv_cache_dtype, kv_memory=1 << 24, quiet=True)
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    expected = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]
    async with real_pair(folder, kv_cache_dtype, **options) as pair:
        for attempt_id, prompt in enumerate(prompts, start=1):
            start = await pair.compute(attempt_id, prompt, NEW_TOKENS)
            assert await pair.finish(start) == expected[attempt_id - 1]
            landed = await pair.to_decode.one("landed", attempt_id)
            assert landed.bytes == -(-len(prompt) // BLOCK_TOKENS) * pair.prepared.layout.block_bytes
        yield pair


@pytest.mark.parametrize(
    ("family", "kv_cache_dtype", "transport"),
    [
        ("llama", "int8", "shared_memory"),
        ("llama", "int8", "grpc"),
        ("llama", "fp8", "shared_memory"),
        ("qwen3_5_text", "auto", "shared_memory"),
        ("qwen3_5_text", "auto", "tcp"),
        ("lfm2", "int8", "shared_memory"),
        ("nemotron_h", "auto", "tcp"),
    ],
)
async def test_transferred_kv_of_any_kind_gives_the_answers_of_one_engine(
    family: str, kv_cache_dtype: str, transport: TransportChoice, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, family, seed=3)
    async with answering_pair(folder, AROUND_A_BLOCK, kv_cache_dtype, transport=transport) as pair:
        assert {landed.transport for landed in pair.to_decode.of_kind("landed")} == {transport}


async def test_each_of_two_ranks_sends_its_part_of_a_state_to_its_peer(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_next", seed=3)
    async with answering_pair(folder, (33, 200), prefill_ranks=2, decode_ranks=2, checksum_share=1.0):
        pass


async def test_quantised_kv_of_two_ranks_is_read_by_one_from_sealed_memory(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama", seed=22)
    async with answering_pair(folder, (1, 32, 33, 200), "int8", transport="grpc", prefill_ranks=2) as pair:
        memory = pair.prefill._host.memory
        assert memory.shared is not None and memory.description.shared_memory is None
        with pytest.raises(PermissionError):
            mmap.mmap(memory.shared.handle.fd, 4096)


async def test_latent_rows_of_one_rank_are_copied_to_each_of_two(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "deepseek_v3", seed=22)
    async with answering_pair(folder, (33, 200), decode_ranks=2, checksum_share=1.0) as pair:
        memory = pair.decode._host.memory
        assert torch.equal(memory.first_part, memory.copies[0]) and memory.first_part.any()
