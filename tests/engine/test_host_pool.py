"""Blocks go out to host memory and come back as they were."""

import pytest
import torch

from baton.engine.kv_cache.block_pool import BlockError
from baton.engine.kv_cache.sizing import host_pieces, most_host_slots
from baton.engine.kv_cache.swap_space import SwapSpace
from baton.engine.request import BlockSwap
from baton.engine.runner.runner import HostPool


def test_a_block_comes_back_byte_for_byte_into_another_place() -> None:
    blocks = torch.arange(4 * 8, dtype=torch.uint8).view(4, 8)
    before = blocks.clone()
    host = HostPool(blocks, total_slots=2)
    host.carry_out([BlockSwap(1, 0), BlockSwap(3, 1)])
    blocks.zero_()
    host.bring_back([BlockSwap(0, 1), BlockSwap(2, 0)])
    assert blocks[0].equal(before[3])
    assert blocks[2].equal(before[1])
    assert not blocks[1].any()
    assert not blocks[3].any()


def test_no_memory_is_taken_before_the_first_swap() -> None:
    host = HostPool(torch.zeros(1, 1, dtype=torch.uint8), total_slots=1 << 60)  # more than there is
    host.carry_out([])
    host.bring_back([])
    with pytest.raises(RuntimeError):
        host.carry_out([BlockSwap(0, 0)])


def test_reserved_memory_is_what_swaps_use(monkeypatch: pytest.MonkeyPatch) -> None:
    host = HostPool(torch.ones(1, 8, dtype=torch.uint8), total_slots=2)
    host.reserve()
    monkeypatch.setattr(torch, "empty", None)  # nothing more is taken
    host.carry_out([BlockSwap(0, 1)])


@pytest.mark.parametrize("block_bytes", [1, 4096, 5000, 3 << 18, (1 << 20) - 1, (1 << 20) + 1])
@pytest.mark.parametrize("host_bytes", [0, 4095, 3 << 20, 256 << 20, 40 << 30, 123428719516])
def test_pinned_memory_is_within_what_was_asked_for_also_when_it_is_rounded_up(
    block_bytes: int, host_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[int] = []

    def empty(shape: tuple[int, int], **options: object) -> torch.Tensor:
        pinned.append(1 << (shape[0] * shape[1] - 1).bit_length())  # as PyTorch's allocator of pinned memory does
        return torch.zeros(1).expand(shape)

    slots = most_host_slots(host_bytes, block_bytes)
    host = HostPool(torch.zeros(1, block_bytes, dtype=torch.uint8), slots)
    monkeypatch.setattr(torch, "empty", empty)
    host.reserve()
    assert sum(pinned) <= host_bytes
    assert slots * block_bytes >= 0.96 * host_bytes - 2 * block_bytes


def test_every_slot_has_a_place_of_its_own() -> None:
    blocks = torch.arange(13, dtype=torch.uint8)[:, None].repeat(1, 3)
    before = blocks.clone()
    host = HostPool(blocks, total_slots=13)
    swaps = [BlockSwap(block, block) for block in range(13)]
    host.carry_out(swaps)
    blocks.zero_()
    host.bring_back(swaps)
    assert blocks.equal(before)
    assert len(list(host_pieces(13, 3))) > 1
    with pytest.raises(IndexError, match="13 slots"):
        host.carry_out([BlockSwap(0, 13)])


def test_a_pool_of_anything_but_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="uint8"):
        HostPool(torch.zeros(4, 8), total_slots=1)


def test_slots_are_taken_all_or_none_and_given_back_once() -> None:
    space = SwapSpace(3)
    taken = space.take(2)
    assert taken is not None
    assert taken.slots == (0, 1)
    assert space.take(2) is None
    assert space.take(1) is not None
    taken.release()
    assert space.take(3) is None and space.take(2) is not None
    with pytest.raises(BlockError):
        taken.release()
    with pytest.raises(BlockError):
        _ = taken.slots
