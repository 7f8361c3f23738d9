"""Paged attention against plain attention over gathered KV, written independently and in float64."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from baton.kernels.attention import paged_decode, paged_prefill
from baton.kernels.libraries.gathered import gathered_prefill, library_takes
from baton.kernels.pages import store_kv
from baton.kernels.types import DecodeRows, KvPages, Scoring

HEADS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS = 6, 2, 24, 5
SCALE = HEAD_DIM**-0.5
NAN = float("nan")


class Pool:
    """One layer of a pool, NaN but for what is stored; blocks are handed out in a shuffled order."""

    def __init__(self, blocks: int = 64, dtype: torch.dtype = torch.float32) -> None:
        whole = torch.full((blocks, 3, 2, KV_HEADS, BLOCK_TOKENS, HEAD_DIM), NAN, dtype=dtype)
        self.layer = KvPages(whole).layer(1)  # as in the engine: a stride between blocks
        self.kv = self.layer.data
        self.free = list(range(blocks))
        random.Random(0).shuffle(self.free)

    def store(self, tokens: int) -> tuple[list[int], torch.Tensor, torch.Tensor]:
        """Blocks, and the keys and values in them, `[tokens, kv_heads, head_dim]`."""
        key, value = torch.randn(2, tokens, KV_HEADS, HEAD_DIM).to(self.kv.dtype)
        blocks = [self.free.pop() for _ in range(-(-tokens // BLOCK_TOKENS))]
        for position in range(tokens):
            block, offset = blocks[position // BLOCK_TOKENS], position % BLOCK_TOKENS
            self.kv[block, 0, :, offset] = key[position]
            self.kv[block, 1, :, offset] = value[position]
        return blocks, key, value


def plain_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int, window: int | None
) -> torch.Tensor:
    """Token by token and head by head."""
    result = torch.empty(query.shape, dtype=torch.float64)
    for row, position in enumerate(range(start, start + len(query))):
        first = max(0, position + 1 - window) if window else 0
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            scores = key[first : position + 1, kv_head].double() @ query[row, head].double() * SCALE
            result[row, head] = scores.softmax(0) @ value[first : position + 1, kv_head].double()
    return result


def decode(
    pool: Pool,
    query: torch.Tensor,
    tables: list[list[int]],
    contexts: list[int],
    window: int | None,
    before: Sequence[int] = (),
) -> torch.Tensor:
    """`before`: blocks of another group of layers, which lie in front of the tables."""
    starts = torch.tensor([len(before)] + [len(table) for table in tables]).cumsum(0)
    block_ids = torch.tensor([*before, *(block for table in tables for block in table)])
    return paged_decode(
        query, pool.layer, DecodeRows(block_ids, starts, torch.tensor(contexts)), Scoring(SCALE, window)
    )


PREFILLS = [(paged_prefill, window) for window in (None, 1, 7, 1000)] + [(gathered_prefill, None)]


@pytest.mark.parametrize(("prefill", "window"), PREFILLS)
@pytest.mark.parametrize(("start", "tokens"), [(0, 1), (0, 2), (0, 37), (3, 2), (5, 5), (14, 23), (36, 1)])
def test_prefill_equals_plain_attention(start: int, tokens: int, prefill: Any, window: int | None) -> None:
    blocks, key, value = (pool := Pool()).store(start + tokens)
    query = torch.randn(tokens, HEADS, HEAD_DIM)
    result = prefill(query, pool.layer, torch.tensor(blocks), start, Scoring(SCALE, window))
    expected = plain_attention(query, key, value, start, window)
    torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [None, 1, 7, 1000])
def test_decode_equals_plain_attention_for_ragged_contexts(window: int | None) -> None:
    pool = Pool()
    contexts = [1, 4, 5, 6, 31, 10, 73]
    stored = [pool.store(context) for context in contexts]
    query = torch.randn(len(contexts), HEADS, HEAD_DIM)
    result = decode(pool, query, [blocks for blocks, _, _ in stored], contexts, window)
    for row, (context, (_, key, value)) in enumerate(zip(contexts, stored, strict=True)):
        expected = plain_attention(query[row : row + 1], key, value, context - 1, window)
        torch.testing.assert_close(result[row : row + 1].double(), expected, atol=1e-5, rtol=0)


def test_decode_does_not_depend_on_neighbours_by_a_bit() -> None:
    pool = Pool()
    contexts = [33, 12, 50]
    tables = [pool.store(context)[0] for context in contexts]
    query = torch.randn(3, HEADS, HEAD_DIM)
    together = decode(pool, query, tables, contexts, None)
    pool.kv[tables[0][2]] = NAN
    poisoned = decode(pool, query, tables, contexts, None)
    alone = decode(pool, query[1:2], tables[1:2], contexts[1:2], None)
    assert poisoned[0].isnan().all()
    assert torch.equal(poisoned[1:], together[1:])
    assert torch.equal(alone[0], together[1])


@pytest.mark.parametrize("window", [None, 7])
def test_decode_finds_tables_of_a_second_group(window: int | None) -> None:
    pool = Pool()
    contexts = [33, 12, 50]
    tables = [pool.store(context)[0] for context in contexts]
    query = torch.randn(3, HEADS, HEAD_DIM)
    behind = decode(pool, query, tables, contexts, window, before=[pool.free[0], pool.free[1]])
    assert torch.equal(behind, decode(pool, query, tables, contexts, window))


def test_extreme_scores_do_not_overflow() -> None:
    pool = Pool()
    blocks, _, value = pool.store(20)
    query = torch.randn(1, HEADS, HEAD_DIM) * 1e4
    result = decode(pool, query, [blocks], [20], None)
    assert result.isfinite().all()
    assert result.abs().max() <= value.abs().max() * 1.0001


@pytest.mark.parametrize(("tokens", "prefill"), [(1, None), (9, paged_prefill), (9, gathered_prefill)])
def test_bfloat16_keeps_dtype_and_value(tokens: int, prefill: Any) -> None:
    pool = Pool(dtype=torch.bfloat16)
    blocks, key, value = pool.store(30)
    query = torch.randn(tokens, HEADS, HEAD_DIM).bfloat16()
    if prefill is None:
        result = decode(pool, query, [blocks], [30], None)
    else:
        result = prefill(query, pool.layer, torch.tensor(blocks), 30 - tokens, Scoring(SCALE))
    assert result.dtype == torch.bfloat16
    expected = plain_attention(query, key, value, 30 - tokens, None)
    torch.testing.assert_close(result.double(), expected, atol=0.02, rtol=0)


@pytest.mark.parametrize("prefill", [paged_prefill, gathered_prefill])
def test_prefill_refuses_a_block_table_of_another_length(prefill: Any) -> None:
    pool = Pool()
    query = torch.randn(6, HEADS, HEAD_DIM)
    with pytest.raises(ValueError, match=r"block_ids must be \[2\]"):
        prefill(query, pool.layer, torch.tensor([1, 2, 3]), 0, Scoring(SCALE))


@pytest.mark.parametrize(
    "scoring",
    [Scoring(SCALE, window=100), Scoring(SCALE, softcap=5.0), Scoring(SCALE, sinks=torch.ones(HEADS))],
    ids=["window", "softcap", "sinks"],
)
def test_only_plain_attention_is_computed_over_gathered_numbers(scoring: Scoring) -> None:
    layer, query = Pool().layer, torch.randn(2, HEADS, HEAD_DIM)
    assert library_takes(layer, Scoring(SCALE)) and not library_takes(layer, scoring)
    with pytest.raises(ValueError, match="gathered attention does not support"):
        gathered_prefill(query, layer, torch.tensor([0]), 0, scoring)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"query": torch.zeros(2, HEADS, HEAD_DIM, dtype=torch.float64)}, "kv must be torch.float64"),
        ({"query": torch.zeros(2, HEADS, HEAD_DIM + 1)}, "kv must be"),
        ({"query": torch.zeros(2, HEADS - 1, HEAD_DIM)}, "multiple"),
        ({"block_ids": torch.zeros(2, dtype=torch.int32)}, "block_ids must be torch.int64"),
        ({"block_starts": torch.zeros(2, dtype=torch.int64)}, "block_starts"),
        ({"context_tokens": torch.zeros(3, dtype=torch.int64)}, "context_tokens"),
    ],
)
def test_decode_rejects_inputs_outside_its_contract(changes: dict[str, Any], named: str) -> None:
    arguments: dict[str, Any] = {
        "query": torch.zeros(2, HEADS, HEAD_DIM),
        "kv": Pool().layer,
        "block_ids": torch.tensor([0, 1]),
        "block_starts": torch.tensor([0, 1, 2]),
        "context_tokens": torch.tensor([1, 1]),
    }
    with pytest.raises(ValueError, match=named):
        query, kv, *rows = (arguments | changes).values()
        paged_decode(query, kv, DecodeRows(*rows), Scoring(SCALE))


def test_values_that_are_the_beginnings_of_keys_are_read_from_there() -> None:
    pool = torch.full((9, 1, 1, 1, BLOCK_TOKENS, HEAD_DIM), NAN)
    key, ids, prefix = torch.randn(23, 1, HEAD_DIM), torch.tensor([7, 2, 4, 0, 5]), 16
    layer = KvPages(pool, None, prefix).layer(0)
    store_kv(
        layer, key, None, ids.repeat_interleave(BLOCK_TOKENS)[:23] * BLOCK_TOKENS + torch.arange(23) % BLOCK_TOKENS
    )
    query = torch.randn(23, HEADS, HEAD_DIM)
    pool[5, ..., 3:, :] = 0.0  # the reference multiplies what lies past the context by 0
    expected = plain_attention(query, key.expand(-1, KV_HEADS, -1), key.expand(-1, KV_HEADS, -1), 0, None)[..., :prefix]
    for each in (layer, layer.shared_by(3)):
        prefilled = paged_prefill(query, each, ids, 0, Scoring(SCALE))
        rows = DecodeRows(ids, torch.tensor([0, 5]), torch.tensor([23]))
        decoded = paged_decode(query[-1:], each, rows, Scoring(SCALE))
        torch.testing.assert_close(prefilled.double(), expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(decoded.double(), expected[-1:], atol=1e-5, rtol=0)
