"""Soft-capped scores and sinks in paged attention, against one token and head at a time in float64."""

import random

import pytest
import torch

from baton.kernels.attention import paged_decode, paged_prefill
from baton.kernels.types import DecodeRows, KvLayer, Scoring

HEADS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS = 6, 2, 20, 7
SINKS = torch.tensor([-2.0, 0.0, 2.0, 300.0, -300.0, 1.0])
SCORINGS = {
    "softcap": Scoring(0.3, softcap=2.0),
    "softcap_window": Scoring(0.3, window=9, softcap=5.0),
    "sinks": Scoring(0.3, sinks=SINKS),
    "sinks_window": Scoring(0.3, window=9, sinks=SINKS),
    "all": Scoring(0.3, window=9, softcap=1.5, sinks=SINKS),
}


class Sequence:
    """Keys and values of one sequence, and the same in blocks of a pool that is NaN everywhere else."""

    def __init__(self, pool: torch.Tensor, block_ids: list[int], tokens: int) -> None:
        self.key, self.value = torch.randn(2, tokens, KV_HEADS, HEAD_DIM)
        self.block_ids = block_ids
        for position in range(tokens):
            block, offset = block_ids[position // BLOCK_TOKENS], position % BLOCK_TOKENS
            pool[block, 0, :, offset] = self.key[position]
            pool[block, 1, :, offset] = self.value[position]

    def attended(self, query: torch.Tensor, start: int, scoring: Scoring) -> torch.Tensor:
        """What the rows of `query`, at positions from `start` on, come to."""
        result = torch.empty(query.shape, dtype=torch.float64)
        for row, position in enumerate(range(start, start + len(query))):
            first = max(0, position + 1 - scoring.window) if scoring.window else 0
            seen = slice(first, position + 1)
            for head in range(HEADS):
                kv_head = head // (HEADS // KV_HEADS)
                scores = self.key[seen, kv_head].double() @ query[row, head].double() * scoring.scale
                if scoring.softcap is not None:
                    scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
                if scoring.sinks is not None:
                    scores = torch.cat((scores, scoring.sinks[head : head + 1].double()))
                result[row, head] = scores.softmax(0)[: position + 1 - first] @ self.value[seen, kv_head].double()
        return result


@pytest.fixture
def sequences() -> tuple[KvLayer, list[Sequence]]:
    torch.manual_seed(0)
    pool = torch.full((40, 2, KV_HEADS, BLOCK_TOKENS, HEAD_DIM), float("nan"))
    free = random.Random(0).sample(range(40), 40)
    lengths = (1, 6, 7, 8, 50, 23)
    made = [Sequence(pool, [free.pop() for _ in range(-(-length // BLOCK_TOKENS))], length) for length in lengths]
    return KvLayer(pool, None), made


@pytest.mark.parametrize("name", SCORINGS)
def test_decode_scores_as_stated(sequences: tuple[KvLayer, list[Sequence]], name: str) -> None:
    layer, made = sequences
    query = torch.randn(len(made), HEADS, HEAD_DIM) * 3
    starts = torch.tensor([0] + [len(sequence.block_ids) for sequence in made]).cumsum(0)
    block_ids = torch.tensor([block for sequence in made for block in sequence.block_ids])
    contexts = torch.tensor([len(sequence.key) for sequence in made])
    result = paged_decode(query, layer, DecodeRows(block_ids, starts, contexts), SCORINGS[name])
    for row, sequence in enumerate(made):
        expected = sequence.attended(query[row : row + 1], len(sequence.key) - 1, SCORINGS[name])
        torch.testing.assert_close(result[row : row + 1].double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", SCORINGS)
@pytest.mark.parametrize("start", [0, 13, 21, 49])
def test_prefill_scores_as_stated(sequences: tuple[KvLayer, list[Sequence]], name: str, start: int) -> None:
    layer, made = sequences
    query = torch.randn(50 - start, HEADS, HEAD_DIM) * 3
    result = paged_prefill(query, layer, torch.tensor(made[4].block_ids), start, SCORINGS[name])
    expected = made[4].attended(query, start, SCORINGS[name])
    torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("scoring", "named"),
    [
        (Scoring(1.0, window=0), "window"),
        (Scoring(1.0, softcap=0.0), "softcap"),
        (Scoring(1.0, sinks=torch.zeros(HEADS + 1)), "sinks"),
        (Scoring(1.0, sinks=torch.zeros(HEADS, dtype=torch.bfloat16)), "sinks"),
    ],
)
def test_scoring_that_means_nothing_is_refused(
    sequences: tuple[KvLayer, list[Sequence]], scoring: Scoring, named: str
) -> None:
    layer, made = sequences
    query = torch.randn(8, HEADS, HEAD_DIM)
    with pytest.raises(ValueError, match=named):
        paged_prefill(query, layer, torch.tensor(made[3].block_ids), 0, scoring)
