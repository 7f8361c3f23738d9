"""Rows of a packed weight: the very numbers that were packed, at odd sizes, at every level of the instruction set."""

import pytest
import torch

from baton.kernels import reference
from baton.kernels.linear import FLOATS, gather_rows
from baton.kernels.native.library import NativeLibrary
from baton.kernels.packed_weight import PackedWeight, Stored, pack, pack_codes, pack_int8

SHAPES = [(1, 1), (33, 7), (31, 64), (64, 130), (100, 575), (200, 33)]


def bits(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(torch.int32)


def odd_numbers(outputs: int, inputs: int) -> torch.Tensor:
    """Among them what is not finite, not normal, or a zero with a sign."""
    torch.manual_seed(0)
    weight = torch.randn(outputs, inputs).bfloat16().float()
    odd = torch.tensor([torch.nan, -torch.inf, -0.0, 1e-40, 3e38]).repeat(outputs * inputs)
    weight.view(-1)[::5] = odd[: len(weight.view(-1)[::5])]
    return weight.bfloat16().float()


@pytest.mark.parametrize("stored", FLOATS)
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_rows_are_the_numbers_that_were_packed_bit_by_bit(
    native: NativeLibrary, stored: Stored, outputs: int, inputs: int
) -> None:
    weight = odd_numbers(outputs, inputs)
    token_ids = torch.randint(outputs, (41,))
    token_ids[0], token_ids[1], token_ids[2] = 0, outputs - 1, token_ids[3]
    made = pack(weight, stored, None)
    for rows in (native.gather_rows(token_ids, made), reference.gather_rows(token_ids, made)):
        assert rows.is_contiguous() and torch.equal(bits(rows), bits(weight[token_ids]))


@pytest.mark.parametrize("stored", FLOATS)
def test_other_rows_and_the_padding_are_not_read(native: NativeLibrary, stored: Stored) -> None:
    weight = torch.full((70, 33), torch.nan)
    weight[::9] = 1.5
    made = pack(weight, stored, None)
    made.data[-1, :, 70 % 32 :] = torch.nan
    if made.data.shape[-1] == 2:
        made.data[:, -1, :, 1] = torch.nan  # behind the last input
    assert bool((native.gather_rows(torch.arange(0, 70, 9), made) == 1.5).all())


@pytest.mark.parametrize("has_offsets", [False, True])
@pytest.mark.parametrize("kind", [torch.uint8, torch.int8])
def test_rows_of_codes_are_dequantised(native: NativeLibrary, kind: torch.dtype, has_offsets: bool) -> None:
    codes = torch.randint(0 if kind == torch.uint8 else -128, 16 if kind == torch.uint8 else 128, (70, 48)).to(kind)
    scales = torch.randn(70, 3).half()
    scales[3, 1] = 3e-8  # not normal
    made = pack_codes(codes, scales, torch.randn(70, 3).half() if has_offsets else None, None)
    token_ids = torch.randint(70, (41,))
    token_ids[0] = 3
    torch.testing.assert_close(native.gather_rows(token_ids, made), reference.gather_rows(token_ids, made))


def test_many_tokens_are_the_same_on_any_number_of_threads(native: NativeLibrary) -> None:
    weight = torch.randn(300, 65)
    token_ids = torch.randint(300, (1000,))
    for count in (1, 3):
        torch.set_num_threads(count)
        rows = native.gather_rows(token_ids, pack(weight, Stored.FLOAT32, None))
        assert torch.equal(rows, weight[token_ids])


def test_strided_ids_are_read() -> None:
    weight = torch.randn(40, 12)
    token_ids = torch.randint(40, (20,))[::3]
    assert torch.equal(gather_rows(token_ids, pack(weight, Stored.FLOAT32, None)), weight[token_ids])


def test_offsets_pass_the_reach_of_32_bits(native: NativeLibrary) -> None:
    """2**31 elements into a weight, of which only the last panel has memory: the others are never touched."""
    inputs, panels = 1 << 10, (1 << 16) + 3
    data = torch.empty(panels, inputs // 2, 32, 2, dtype=torch.bfloat16)
    assert data.numel() > 1 << 31
    data[-1, :, 5] = 2.0
    made = PackedWeight(data, Stored.BFLOAT16, panels * 32, inputs, None)
    assert bool((native.gather_rows(torch.tensor([(panels - 1) * 32 + 5]), made) == 2.0).all())


@pytest.mark.parametrize("spoilt", [-1, 40, 1 << 40])
def test_out_of_range_id_is_rejected_before_any_read(native: NativeLibrary, spoilt: int) -> None:
    made = pack(torch.randn(40, 12), Stored.BFLOAT16, None)
    for gather in (native.gather_rows, reference.gather_rows):
        with pytest.raises(IndexError, match="the weight has 40 rows"):
            gather(torch.tensor([3, spoilt]), made)


def test_integer_weights_are_rejected() -> None:
    made = pack_int8(torch.ones(40, 64, dtype=torch.int8), torch.ones(40), None)
    with pytest.raises(ValueError, match="INT8"):
        gather_rows(torch.tensor([3]), made)


def test_ids_are_int64() -> None:
    with pytest.raises(ValueError, match="int64"):
        gather_rows(torch.tensor([3], dtype=torch.int32), pack(torch.randn(40, 12), Stored.FLOAT32, None))
