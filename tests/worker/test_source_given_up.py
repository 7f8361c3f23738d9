"""A prompt is pulled in part, given up, and pulled again: its KV comes from two transfers, and the answer is exact."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from baton.protos import session_pb2
from baton.text.block_hash import HashChain
from baton.worker.transfer.reader import TransferReader
from tests.fixtures.paged import random_prompt
from tests.fixtures.real_workers import BLOCK_TOKENS, RealPair, real_pair
from tests.fixtures.session_client import eventually

PROMPT = random_prompt(170, seed=11)
BLOCKS, OFFERED, NEW_TOKENS = 6, 4, 6
HASHES = HashChain(bytes(32), BLOCK_TOKENS).first(len(PROMPT) // BLOCK_TOKENS, PROMPT)


def offers_only(pair: RealPair, most_blocks: int) -> Any:
    """Prefill tells its reader of so many blocks and no more; undone by what is returned."""
    transfers = pair.prefill.transfers
    real, offered = transfers.advance, 0

    def advance(transfer_id: bytes, blocks: Sequence[int], first: Any) -> None:
        nonlocal offered
        offered += len(blocks)
        if offered <= most_blocks:
            real(transfer_id, blocks, None)

    transfers.advance = advance  # type: ignore[method-assign]

    def undo() -> None:
        transfers.advance = real  # type: ignore[method-assign]

    return undo


async def test_answer_over_kv_of_two_attempts_is_exact(checkpoint: Path) -> None:
    async with real_pair(checkpoint) as pair:
        reader: TransferReader = pair.decode.reader
        reader._confirm_period_s = 0.01
        expected = await pair.finish(await pair.compute(8, PROMPT, NEW_TOKENS))  # published nowhere: without hashes

        undo = offers_only(pair, OFFERED)
        start = await pair.compute(1, PROMPT, NEW_TOKENS, HASHES)
        await pair.to_decode.send(start=start)
        await eventually(lambda: [answer.confirmed.blocks for answer in pair.decode.service._table] == [OFFERED])
        undo()
        await pair.to_decode.send(cancel=session_pb2.Cancel(attempt_id=1, keep_landed=True))
        await pair.to_prefill.send(cancel=session_pb2.Cancel(attempt_id=1))

        assert await pair.finish(await pair.compute(2, PROMPT, NEW_TOKENS, HASHES)) == expected
        landed = await pair.to_decode.one("landed", 2)
        assert landed.cached_tokens == OFFERED * BLOCK_TOKENS
        assert landed.bytes == (BLOCKS - OFFERED) * pair.prepared.layout.block_bytes
