"""One bit of a cached or landed block is flipped: the answer that reads it differs. So the tests can see KV faults."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.engine.request import Chunk, NonFinite, Plan, Sample
from baton.engine.sampling.params import SamplingParams
from baton.kernels.types import QUANTISED, KvPages
from baton.protos import session_pb2
from baton.text.block_hash import HashChain
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import PagedModel, random_prompt
from tests.fixtures.real_workers import BLOCK_TOKENS, BLOCKS, real_pair
from tests.fixtures.session_client import eventually

PROMPT = random_prompt(100, seed=9)
NEW_TOKENS = 12
VALUES = 1
TOP_EXPONENT_BIT = 1 << 30  # of a float32


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("poisoned") / "tiny", "llama", seed=21)


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokens = torch.tensor([PROMPT])
    with torch.inference_mode():
        answer = model.generate(  # type: ignore[misc]
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
        )
    return [int(token) for token in answer[0, len(PROMPT) :]]


def flip_a_bit(pages: KvPages, block: int) -> None:
    """Of the fourth token's value in some layer and head: of its first number, or of the scale of them all."""
    numbers = pages.data[..., 0] if pages.scales is None else pages.scales
    numbers.view(torch.int32)[block, 1, VALUES, 0, 3] ^= TOP_EXPONENT_BIT


def written(before: torch.Tensor, now: torch.Tensor) -> list[int]:
    """Blocks whose bytes differ."""
    pairs = zip(before.view(torch.uint8).flatten(1), now.view(torch.uint8).flatten(1), strict=True)
    return [block for block, (old, new) in enumerate(pairs) if not torch.equal(old, new)]


@pytest.mark.parametrize("kv_dtype", [torch.float32, *QUANTISED], ids=str)
def test_flipped_bit_in_the_pool_changes_the_answer(checkpoint: Path, kv_dtype: torch.dtype) -> None:
    def answer(poison: bool) -> list[int] | None:
        paged = PagedModel(checkpoint, blocks=8, kv_dtype=kv_dtype)
        table, tokens = paged.blocks(len(PROMPT) + NEW_TOKENS), list(PROMPT)
        paged.runner.run(Plan((Chunk(1, PROMPT[:-1], 0, table),)))
        if poison:
            flip_a_bit(paged.kv, table[1])
        while len(tokens) < len(PROMPT) + NEW_TOKENS:
            samples = (Sample(0, SamplingParams(max_tokens=NEW_TOKENS)),)
            [result] = paged.runner.run(Plan((Chunk(1, tokens[-1:], len(tokens) - 1, table, samples),)))
            if isinstance(result, NonFinite):
                return None
            tokens += [drawn.token_id for drawn in result.drawn]
        return tokens[len(PROMPT) :]

    clean = answer(poison=False)
    assert clean is not None
    assert answer(poison=True) != clean


async def test_bit_flipped_between_prefill_and_the_pull_changes_the_answer(checkpoint: Path, oracle: list[int]) -> None:
    async with real_pair(checkpoint) as pair:
        before = pair.prefill_pages.data.clone()
        start = await pair.compute(1, PROMPT, NEW_TOKENS)
        flip_a_bit(pair.prefill_pages, written(before, pair.prefill_pages.data)[0])
        assert await pair.finish(start) != oracle
        assert await pair.finish(await pair.compute(2, PROMPT, NEW_TOKENS)) == oracle


async def test_bit_flipped_in_a_block_cached_at_decode_changes_the_next_answer(
    checkpoint: Path, oracle: list[int]
) -> None:
    hashes = HashChain(bytes(32), BLOCK_TOKENS).first(len(PROMPT) // BLOCK_TOKENS, PROMPT)
    async with real_pair(checkpoint) as pair:
        before = pair.decode_pages.data.clone()
        for attempt_id in (1, 2):
            assert await pair.finish(await pair.compute(attempt_id, PROMPT, NEW_TOKENS, hashes)) == oracle
        assert (await pair.to_decode.one("landed", 2)).cached_tokens == len(hashes) * BLOCK_TOKENS
        flip_a_bit(pair.decode_pages, written(before, pair.decode_pages.data)[0])
        assert await pair.finish(await pair.compute(3, PROMPT, NEW_TOKENS, hashes)) != oracle


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
async def test_cached_bit_flip_is_found_before_use_if_all_blocks_are_compared(
    checkpoint: Path, kv_cache_dtype: str, role: str
) -> None:
    hashes = HashChain(bytes(32), BLOCK_TOKENS).first(len(PROMPT) // BLOCK_TOKENS, PROMPT)
    async with real_pair(checkpoint, kv_cache_dtype, kv_check_share=1.0) as pair:
        worker = pair.prefill if role == "prefill" else pair.decode
        rest, storage = worker._host.at_rest, worker._host.memory.storage
        assert rest is not None and isinstance(storage, torch.Tensor)
        blocks = storage.view(BLOCKS, -1)
        before = blocks.clone()
        right = await pair.finish(await pair.compute(1, PROMPT, NEW_TOKENS, hashes))
        await eventually(lambda: len(rest._known) >= len(hashes))
        blocks[written(before, blocks)[0], 77] ^= 4
        assert await pair.finish(await pair.compute(2, PROMPT, NEW_TOKENS, hashes)) == right
        assert rest.counters.corrupt_at_rest_blocks == 1


async def test_nonfinite_cached_block_fails_one_answer_and_the_next_is_exact(
    checkpoint: Path, oracle: list[int]
) -> None:
    hashes = HashChain(bytes(32), BLOCK_TOKENS).first(len(PROMPT) // BLOCK_TOKENS, PROMPT)
    async with real_pair(checkpoint) as pair:
        assert await pair.finish(await pair.compute(1, PROMPT, NEW_TOKENS, hashes)) == oracle
        pages = pair.decode_pages.data  # all that is not zero was computed, and is cached: nobody computes now
        pages.masked_fill_(pages != 0, float("nan"))
        assert await pair.finish(await pair.compute(2, PROMPT, NEW_TOKENS, hashes)) is None
        [failed] = pair.to_decode.about("failed", 2)
        assert failed.reason == session_pb2.FAILURE_REASON_NONFINITE
        assert await pair.finish(await pair.compute(3, PROMPT, NEW_TOKENS, hashes)) == oracle
