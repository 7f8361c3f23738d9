"""Tensors copied into large pages: the same numbers, one after the other."""

import itertools

import pytest
import torch

from baton.kernels.native import huge_pages
from baton.kernels.native.huge_pages import ALIGNMENT_BYTES, HUGE_PAGE_BYTES, STRETCH_BYTES, HugePages


def test_numbers_and_shapes_stay_and_lie_one_after_the_other() -> None:
    tensors = [
        torch.randn(300, 1001),
        torch.randint(-9, 9, (7, 3), dtype=torch.int8),
        torch.randn(600, 1000).bfloat16(),
    ]
    pages = HugePages()
    copies = [pages.copy(tensor) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        assert torch.equal(copy, tensor) and copy.dtype == tensor.dtype
        assert copy.is_contiguous()
        assert copy.data_ptr() % ALIGNMENT_BYTES == 0
    assert copies[0].data_ptr() % HUGE_PAGE_BYTES == 0
    for before, after in itertools.pairwise(copies):
        assert 0 <= after.data_ptr() - (before.data_ptr() + before.nbytes) < ALIGNMENT_BYTES


def test_copy_that_does_not_fit_begins_a_new_page() -> None:
    pages = HugePages()
    first, second = pages.copy(torch.ones(5)), pages.copy(torch.full((STRETCH_BYTES,), 3, dtype=torch.uint8))
    assert second.data_ptr() % HUGE_PAGE_BYTES == 0
    assert first.sum() == 5 and second.min() == second.max() == 3


def test_copies_outlive_their_source() -> None:
    copy = HugePages().copy(torch.arange(1000))
    others = [HugePages().copy(torch.zeros(1000)) for _ in range(3)]
    assert copy.sum() == 999 * 500 and not sum(other.sum() for other in others)


def test_without_such_pages_it_copies_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_stretch", lambda nbytes: None)
    tensor = torch.ones(1000)
    copy = HugePages().copy(tensor)
    assert torch.equal(copy, tensor) and copy.data_ptr() != tensor.data_ptr()
