"""The native kernels of sampling against the reference, at every level of the instruction set that this machine has."""

import random

import pytest
import torch

from baton.kernels import reference
from baton.kernels.native.library import NativeLibrary
from tests.fixtures.sampled import by_reference, drawn_by

SIZES = [1, 2, 15, 16, 17, 63, 64, 100, 1023, 1024, 1025, 3000]


def logits_of(draw: random.Random, rows: int) -> torch.Tensor:
    """Some with many ties, some with banned tokens; rows stand apart, and what is between them is NaN."""
    size = draw.choice(SIZES)
    logits = torch.full((rows, size + 3), torch.nan)[:, :size]
    logits[:] = torch.randn(rows, size) * draw.choice([0.1, 1.0, 8.0])
    if draw.random() < 0.4:
        logits[:] = (logits * 2).round() / 2
    if draw.random() < 0.4 and size > 5:
        logits[:, draw.randrange(size)] = -torch.inf
    return logits


@pytest.mark.parametrize("seed", range(24))
def test_survey_equals_the_reference(native: NativeLibrary, seed: int) -> None:
    torch.manual_seed(seed)
    logits = logits_of(random.Random(seed), 3).clamp(min=-1e30)
    found, expected = native.row_statistics(logits), reference.row_statistics(logits)
    assert found.finite.all() and expected.finite.all()
    assert found.best.tolist() == [row.index(max(row)) for row in logits.tolist()]
    torch.testing.assert_close(found.log_totals, expected.log_totals, rtol=0, atol=1e-5)


@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 40, 99])
def test_nonfinite_row_is_found_alone(native: NativeLibrary, place: int, spoilt: float) -> None:
    logits = torch.randn(3, 100)
    clean = native.row_statistics(logits)
    logits[1, place] = spoilt
    found = native.row_statistics(logits)
    assert found.finite.tolist() == [True, False, True]
    assert torch.equal(found.best[::2], clean.best[::2])
    assert torch.equal(found.log_totals[::2], clean.log_totals[::2])


@pytest.mark.parametrize("seed", range(24))
def test_samples_are_the_references(native: NativeLibrary, seed: int) -> None:
    torch.manual_seed(seed)
    draw = random.Random(seed)
    logits = logits_of(draw, 6)
    temperature = torch.tensor([0.0, 1e-38, *[draw.uniform(0.1, 2.0) for _ in range(4)]])
    top_k = torch.tensor([draw.choice([0, 1, 3, 50, 5000]) for _ in range(6)])
    top_p = torch.tensor([draw.choice([0.0, 0.3, 0.9, 1.0]) for _ in range(6)])
    uniform = torch.rand(6, dtype=torch.float64)
    asked = (logits, temperature, top_k, top_p, uniform)
    found, expected = drawn_by(native, *asked), by_reference(*asked)
    assert torch.equal(found.token_ids, expected.token_ids)
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2**-53])
def test_numbers_at_the_ends_choose_tokens_that_may_be_drawn(native: NativeLibrary, number: float) -> None:
    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf, 0.0, -torch.inf]])
    asked = (torch.ones(1), torch.zeros(1, dtype=torch.int64), torch.ones(1), torch.tensor([number]).double())
    expected = 1 if number <= 0.5 else 3
    assert drawn_by(native, logits, *asked).token_ids.tolist() == [expected]


@pytest.mark.parametrize("row", [[torch.nan, 1.0], [torch.inf, 1.0], [-torch.inf, -torch.inf]])
def test_row_without_a_token_to_draw_says_so(native: NativeLibrary, row: list[float]) -> None:
    asked = (torch.ones(1), torch.zeros(1, dtype=torch.int64), torch.ones(1), torch.tensor([0.5]).double())
    assert drawn_by(native, torch.tensor([row]), *asked).logprobs.isnan().all()


def test_banned_token_spoils_a_row_that_may_ban_none(native: NativeLibrary) -> None:
    logits = torch.tensor([[1.0, -torch.inf], [1.0, 0.0]])
    asked = (torch.zeros(2), torch.zeros(2, dtype=torch.int64), torch.ones(2), torch.zeros(2, dtype=torch.float64))
    for may_ban, expected in ((True, [False, False]), (False, [True, False])):
        assert drawn_by(native, logits, *asked, may_ban).logprobs.isnan().tolist() == expected
        assert by_reference(logits, *asked, may_ban).logprobs.isnan().tolist() == expected


@pytest.mark.parametrize("seed", range(12))
def test_gathered_rows_keep_what_their_masks_allow(native: NativeLibrary, seed: int) -> None:
    """Masks with words that are all zeros or ones, shorter and longer than the rows; rows in any order, and twice."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    logits = logits_of(draw, 5).nan_to_num(neginf=-9.0)
    size = logits.shape[1]
    masks: list[torch.Tensor | None] = [None]
    for dense in (0.03, 0.5, 0.97):
        bits = torch.rand(-(-size // 8) * 8 + draw.choice([-8, 0, 24])) < dense
        masks.append((bits.view(-1, 8) << torch.arange(8)).sum(-1).to(torch.uint8))
    draw.shuffle(masks)
    places = draw.choices(range(5), k=len(masks))
    before = logits.clone()
    taken = native.masked_rows(logits, places, masks)
    assert torch.equal(taken, reference.masked_rows(logits, places, masks))
    assert torch.equal(logits, before)
    for row, place, mask in zip(taken, places, masks, strict=True):
        packed = [255] * size if mask is None else mask.tolist()
        kept = [id for id in range(size) if id // 8 < len(packed) and packed[id // 8] >> id % 8 & 1]
        assert row.isfinite().nonzero().flatten().tolist() == kept
        assert torch.equal(row[kept], logits[place, kept])


@pytest.mark.parametrize("seed", range(12))
def test_likeliest_token_obeys_the_mask(native: NativeLibrary, seed: int) -> None:
    """Masks of all sizes, some of one token; ties; nothing else that is known of a row depends on its mask."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    logits = logits_of(draw, 6).nan_to_num(neginf=-9.0)
    if draw.random() < 0.5:
        logits = logits.round()  # ties
    size = logits.shape[1]
    masks: list[torch.Tensor | None] = [None]
    for dense in (0.0, 0.03, 0.5, 0.97, 1.0):
        bits = torch.rand(max(8, -(-size // 8) * 8 + draw.choice([-8, 0, 24]))) < dense
        bits[draw.randrange(min(size, len(bits)))] = True
        masks.append((bits.view(-1, 8) << torch.arange(8)).sum(-1).to(torch.uint8))
    draw.shuffle(masks)
    found, free = native.row_statistics(logits, masks), native.row_statistics(logits)
    taken = reference.masked_rows(logits, range(6), masks)
    assert found.best.tolist() == [row.index(max(row)) for row in taken.tolist()]
    among = reference.row_statistics(logits, masks).best
    assert torch.equal(taken[range(6), among], taken[range(6), found.best])
    assert torch.equal(found.log_totals, free.log_totals) and torch.equal(found.finite, free.finite)
