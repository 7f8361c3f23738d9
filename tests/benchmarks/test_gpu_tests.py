"""What the tests of a GPU rest on, where there is none: their bounds, and the processes that run them."""

import functools
import math
from pathlib import Path

import pytest
import torch

from baton.engine.request import Chunk, Plan
from baton.kernels import attention, reference
from baton.kernels.types import KvLayer, Scoring
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import PagedModel, random_prompt
from tests.gpu.device import ATTENTION_ROUNDING, apart

BLOCK, PROMPT = 16, random_prompt(300)


def tiled(
    query: torch.Tensor, kv: KvLayer, block_ids: torch.Tensor, start: int, scoring: Scoring, tile: int, seen: int
) -> torch.Tensor:
    """Attention as a kernel adds it up, `tile` keys at a time, with weights in bf16. `seen`: keys that a token sees of
    those after it, 0 where it is right."""
    tokens, end = len(query), start + len(query)
    own = kv.data.permute(1, 2, 0, 3, 4).index_select(2, block_ids).flatten(2, 3)[:, :, :end].float()
    keys, values = own.repeat_interleave(query.shape[1] // own.shape[1], 1)
    scores = (query.transpose(0, 1).float() @ keys.transpose(1, 2)) * scoring.scale
    visible = torch.ones(tokens, end, dtype=torch.bool).tril(start + seen)
    scores = scores.masked_fill(~visible, -math.inf)
    highest, total, sums = torch.full(scores.shape[:2], -1e30), torch.zeros(scores.shape[:2]), torch.tensor(0.0)
    for begin in range(0, end, tile):
        part = scores[..., begin : begin + tile]
        higher = torch.maximum(highest, part.amax(-1))
        weights, kept = (part - higher[..., None]).exp(), (highest - higher).exp()
        total = total * kept + weights.sum(-1)
        sums = sums * kept[..., None] + weights.bfloat16().float() @ values[:, begin : begin + tile]
        highest = higher
    return (sums / total[..., None]).transpose(0, 1).to(query.dtype)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("bounds"), "llama")


def kv_of_prompt(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tile: int, seen: int = 0) -> torch.Tensor:
    monkeypatch.setattr(reference, "paged_prefill", functools.partial(tiled, tile=tile, seen=seen))
    monkeypatch.setattr(attention, "pick", lambda spelled, *_: spelled)
    paged = PagedModel(checkpoint, BLOCK, 32, torch.bfloat16)
    table = paged.blocks(len(PROMPT))
    paged.runner.run(Plan((Chunk(0, PROMPT, 0, table),)))
    return torch.nan_to_num(paged.kv.data[table], nan=0.0)  # slots behind the prompt


def test_attentions_in_another_order_are_as_close_as_they_are_asked_to_be(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = (kv_of_prompt(checkpoint, monkeypatch, tile) for tile in (64, 512))
    assert 0 < apart(ours, theirs) < ATTENTION_ROUNDING


def test_a_mask_that_shows_one_token_too_many_is_not(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = (kv_of_prompt(checkpoint, monkeypatch, 64, seen) for seen in (0, 1))
    assert apart(wrong, right) > ATTENTION_ROUNDING


def test_numbers_that_are_none_are_never_close() -> None:
    assert not apart(torch.tensor([1.0, math.nan]), torch.ones(2)) < ATTENTION_ROUNDING
