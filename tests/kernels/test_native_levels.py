"""Levels of the instruction set that few processors have: they compile anywhere, and do without where they must."""

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from baton.kernels.native.build import EMULATED_AMX, build, processor_level
from baton.kernels.native.library import NativeLibrary
from baton.kernels.packed_weight import Stored, pack
from tests.fixtures.native_levels import TESTED, built_at, native_at


def test_the_level_of_amx_compiles_on_any_processor(tmp_path: Path) -> None:
    if processor_level() == "AMX_BF16":
        assert built_at("AMX_BF16").exists()  # it runs in the other tests
    else:
        assert build("AMX_BF16", tmp_path, ("-O0",)).exists()


@pytest.fixture(scope="module")
def emulated() -> NativeLibrary:
    if "AVX512_VNNI" not in TESTED:
        pytest.skip("needs a processor with AVX-512")
    return native_at(EMULATED_AMX)


@pytest.fixture
def without_tiles(emulated: NativeLibrary) -> Iterator[NativeLibrary]:
    """As where the system lets no process use them."""
    library = ctypes.CDLL(str(built_at(EMULATED_AMX)))
    library.baton_allow_tiles(0)
    yield emulated
    library.baton_allow_tiles(1)


def test_the_level_of_amx_multiplies_without_where_the_system_refuses_it(without_tiles: NativeLibrary) -> None:
    weight, x = pack(torch.randn(70, 130), Stored.ROUNDING, None), torch.randn(33, 130)
    [bfloat16] = [level for level in TESTED if level.startswith("AVX512_BF16")]
    assert torch.equal(without_tiles.packed_linear(x, weight), native_at(bfloat16).packed_linear(x, weight))


@pytest.mark.parametrize(("rows", "inputs"), [(1, 1), (1, 700), (17, 33), (40, 700), (300, 64)])
def test_sums_in_tiles_come_about_in_the_order_of_the_manual(emulated: NativeLibrary, rows: int, inputs: int) -> None:
    """Two sums per output and 32 inputs, then both, then all."""
    torch.manual_seed(0)
    weight, x = torch.randn(40, inputs).bfloat16(), torch.randn(rows, inputs).bfloat16()
    total = torch.zeros(rows, 40)
    for begin in range(0, inputs, 32):
        products = x[:, None, begin : begin + 32].double() * weight[None, :, begin : begin + 32].double()
        sums = [torch.zeros(rows, 40), torch.zeros(rows, 40)]
        for n in range(products.shape[2]):  # a product of two numbers of bfloat16 is exact in float64
            sums[n % 2] = (sums[n % 2].double() + products[..., n]).float()
        total = total + (sums[0] + sums[1])
    assert torch.equal(emulated.packed_linear(x.float(), pack(weight, Stored.ROUNDING, None)), total)
