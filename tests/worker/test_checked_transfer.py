"""Checksums of blocks that go from prefill to decode: corrupt ones are never used, published, or offered again."""

from pathlib import Path

import pytest
import torch

from baton.kvtransfer.description import TransportChoice
from baton.protos import session_pb2
from baton.text.block_hash import HashChain
from tests.fixtures.paged import random_prompt
from tests.fixtures.real_workers import BLOCK_TOKENS, RealPair, real_pair

PROMPT = random_prompt(100, seed=9)
NEW_TOKENS = 6
HASHES = HashChain(bytes(32), BLOCK_TOKENS).first(len(PROMPT) // BLOCK_TOKENS, PROMPT)


def pool_of(pair: RealPair) -> torch.Tensor:
    storage = pair.prefill._host.memory.storage
    assert isinstance(storage, torch.Tensor)
    return storage


async def corrupt_one(pair: RealPair) -> None:
    """Computes attempt 1, changes one byte of its KV before decode reads it, and sees decode refuse it."""
    pool_of(pair).zero_()
    start = await pair.compute(1, PROMPT, NEW_TOKENS, HASHES)
    pool_of(pair)[pool_of(pair).nonzero()[0]] ^= 1
    assert await pair.finish(start) is None
    [failed] = pair.to_decode.about("failed", 1)
    assert failed.reason == session_pb2.FAILURE_REASON_CORRUPT


@pytest.mark.parametrize("transport", ["shared_memory", "tcp", "grpc"])
async def test_byte_flipped_before_the_pull_is_found_and_the_prompt_recomputed(
    checkpoint: Path, transport: TransportChoice
) -> None:
    async with real_pair(checkpoint, transport=transport, checksum_share=1.0) as pair:
        expected = await pair.finish(await pair.compute(8, PROMPT, NEW_TOKENS))  # published nowhere: without hashes
        checked = pair.decode.reader.integrity.checked_blocks
        assert checked > 0 and pair.decode.reader.integrity.checksum_mismatches == 0

        await corrupt_one(pair)
        assert pair.decode.reader.integrity.checksum_mismatches == 1
        assert await pair.finish(await pair.compute(2, PROMPT, NEW_TOKENS, HASHES)) == expected
        [first] = pair.to_prefill.about("first_step", 2)
        assert first.timings.cached_tokens == 0, "the corrupt blocks were offered again"
        assert (await pair.to_decode.one("landed", 2)).cached_tokens == 0, "corrupt blocks were published"


async def test_without_checksums_nothing_is_compared(checkpoint: Path) -> None:
    async with real_pair(checkpoint, checksum_share=0.0) as pair:
        assert await pair.finish(await pair.compute(1, PROMPT, NEW_TOKENS)) is not None
        assert pair.decode.reader.integrity.checked_blocks == 0
