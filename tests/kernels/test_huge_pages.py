"""Tensors moved into large pages: the same numbers, one after the other."""

import torch

from kernels.huge_pages import ALIGNMENT_BYTES, HUGE_PAGE_BYTES, move_to_huge_pages


def test_numbers_and_shapes_stay_and_lie_one_after_the_other() -> None:
    tensors = [
        torch.randn(300, 1001),
        torch.randint(-9, 9, (7, 3), dtype=torch.int8),
        torch.randn(600, 1000).bfloat16(),
    ]
    before = [tensor.clone() for tensor in tensors]
    move_to_huge_pages(tensors)
    for tensor, numbers in zip(tensors, before, strict=True):
        assert torch.equal(tensor, numbers)
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % ALIGNMENT_BYTES == 0
    assert tensors[0].data_ptr() % HUGE_PAGE_BYTES == 0
    assert 0 < tensors[1].data_ptr() - (tensors[0].data_ptr() + tensors[0].nbytes) + 1 <= ALIGNMENT_BYTES


def test_others_who_hold_the_tensor_see_it_moved() -> None:
    tensor = torch.zeros(HUGE_PAGE_BYTES)
    holder, old = {"weight": tensor}, tensor.data_ptr()
    move_to_huge_pages([tensor])
    assert holder["weight"].data_ptr() != old
    tensor.fill_(3)
    assert holder["weight"].sum() == 3 * HUGE_PAGE_BYTES


def test_what_does_not_fill_a_page_stays_where_it_is() -> None:
    tensor = torch.zeros(1000)
    old = tensor.data_ptr()
    move_to_huge_pages([tensor])
    assert tensor.data_ptr() == old
