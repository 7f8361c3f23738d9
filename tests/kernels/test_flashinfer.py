"""Chunks by FlashInfer: what it is told of them, and that it reads the pool where it lies."""

import pytest
import torch

from baton.engine.kv_cache.layout import KvLayout
from baton.kernels import reference
from baton.kernels.attention import paged_prefills
from baton.kernels.dispatch import on_the_interpreter
from baton.kernels.libraries.flashinfer import FlashInferPrefill, is_compiled, is_installed
from baton.kernels.types import KvLayer, KvPages, PrefillChunks, PrefillRows, Scoring
from tests.fixtures import imitated_flashinfer

HEADS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS = 6, 2, 24, 5
ASKED = [(12, 2, [3, 1, 0]), (0, 5, [8]), (5, 4, [7, 9])]  # start, tokens and blocks of chunks
TOKENS = sum(tokens for _, tokens, _ in ASKED)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> KvPages:
    """NaN but for the tokens of the chunks' contexts."""
    torch.manual_seed(0)
    imitated_flashinfer.install(monkeypatch)
    layout = KvLayout(3, KV_HEADS, BLOCK_TOKENS, HEAD_DIM, torch.bfloat16)
    pages = layout.view(torch.full((10 * layout.block_bytes,), 0xFF, dtype=torch.uint8), 10)
    for start, tokens, ids in ASKED:
        for position in range(start + tokens):
            pages.data[ids[position // BLOCK_TOKENS], :, :, :, position % BLOCK_TOKENS].normal_()
    return pages


def chunks(by_library: int) -> PrefillChunks:
    """Behind three rows of answers. Numbers for a kernel of ours are not made."""
    made, begin = [], 3
    for start, tokens, ids in ASKED:
        made.append(PrefillRows(slice(begin, begin + tokens), start, torch.tensor(ids)))
        begin += tokens
    nothing = torch.zeros(0, dtype=torch.int64)
    return PrefillChunks(tuple(made), nothing, nothing, nothing, nothing, by_library)


def attend(planned: PrefillChunks, query: torch.Tensor, layer: KvLayer, scoring: Scoring) -> torch.Tensor:
    out = torch.full_like(query, torch.nan)
    with on_the_interpreter():
        paged_prefills(query, layer, planned, scoring, out)
    return out


def expected(query: torch.Tensor, layer: KvLayer, scoring: Scoring) -> torch.Tensor:
    parts = zip(query.split([tokens for _, tokens, _ in ASKED]), ASKED, strict=True)
    return torch.cat(
        [reference.paged_prefill(own, layer, torch.tensor(ids), start, scoring) for own, (start, _, ids) in parts]
    )


def test_chunks_of_any_start_attend_like_the_reference_with_one_plan(pool: KvPages) -> None:
    planner = FlashInferPrefill(HEADS, pool.layer(0))
    planned = planner.plan(chunks(3))
    for index, scale in enumerate((0.3, 0.7, 0.1)):
        query = torch.randn(TOKENS, HEADS, HEAD_DIM).bfloat16()
        scoring, layer = Scoring(scale), pool.layer(index)
        torch.testing.assert_close(attend(planned, query, layer, scoring), expected(query, layer, scoring))
    assert planner._wrapper.plans == 1


def test_plan_belongs_to_the_chunks_of_its_step(pool: KvPages) -> None:
    planner, query = FlashInferPrefill(HEADS, pool.layer(0)), torch.randn(TOKENS, HEADS, HEAD_DIM).bfloat16()
    planner.plan(chunks(2))
    found = attend(planner.plan(chunks(3)), query, pool.layer(1), Scoring(0.3))
    torch.testing.assert_close(found, expected(query, pool.layer(1), Scoring(0.3)))


def test_only_the_last_chunks_are_planned(pool: KvPages) -> None:
    planned = FlashInferPrefill(HEADS, pool.layer(0)).plan(chunks(2))
    assert planned.planned is not None
    query = torch.randn(TOKENS, HEADS, HEAD_DIM).bfloat16()
    out = torch.full_like(query[2:], torch.nan)
    planned.planned(query[2:], pool.layer(1), Scoring(0.3), out)
    torch.testing.assert_close(out, expected(query, pool.layer(1), Scoring(0.3))[2:])


def test_pool_is_read_in_place(pool: KvPages) -> None:
    planner, query = FlashInferPrefill(HEADS, pool.layer(0)), torch.randn(TOKENS, HEADS, HEAD_DIM).bfloat16()
    attend(planner.plan(chunks(3)), query, pool.layer(2), Scoring(0.3))
    assert planner._wrapper.pools == [(pool.layer(2).data.data_ptr(), pool.layer(2).data.stride())]
    assert not pool.layer(2).data.is_contiguous()


def test_step_without_such_chunks_is_not_planned(pool: KvPages) -> None:
    planner, asked = FlashInferPrefill(HEADS, pool.layer(0)), chunks(0)
    assert planner.plan(asked) is asked and planner._wrapper.plans == 0


@pytest.mark.parametrize("compiled", [True, False])
def test_kernels_needing_compilation_are_distinguished(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    imitated_flashinfer.install(monkeypatch, compiled=compiled)
    assert is_installed() and is_compiled() is compiled
