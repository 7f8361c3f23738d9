"""Levels of the instruction set that few processors have: they compile anywhere, and do without where they must."""

from pathlib import Path

import pytest
import torch

from kernels.native.build import NoCompiler, build, processor_level
from kernels.native.library import NativeLibrary
from kernels.packed_weight import Stored, pack
from tests.fixtures.native_levels import native_at


@pytest.fixture(scope="module")
def amx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return build("AMX_BF16", tmp_path_factory.mktemp("built"))
    except NoCompiler as error:
        pytest.skip(str(error))


def test_the_level_of_amx_compiles_on_any_processor(amx: Path) -> None:
    assert amx.exists()


def test_the_level_of_amx_multiplies_without_where_the_processor_has_none(amx: Path) -> None:
    if processor_level() != "AVX512_BF16":
        pytest.skip("only a processor with all of that level but AMX can tell")
    weight, x = pack(torch.randn(70, 130), Stored.ROUNDING, None), torch.randn(33, 130)
    expected = native_at("AVX512_BF16").layers.linear(x, weight)
    assert torch.equal(NativeLibrary(amx).layers.linear(x, weight), expected)


def linear_in_tiles(rows: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As the emulated tiles make it, and by Intel's manual: two sums per output and 32 inputs, then both, then all."""
    if processor_level() not in ("AVX512_VNNI", "AVX512_BF16"):
        pytest.skip("emulated on processors with AVX-512 and without AMX")
    torch.manual_seed(0)
    weight, x = torch.randn(40, inputs).bfloat16(), torch.randn(rows, inputs).bfloat16()
    found = native_at("AMX_BF16_EMULATED").layers.linear(x.float(), pack(weight, Stored.ROUNDING, None))
    total = torch.zeros(rows, 40)
    for begin in range(0, inputs, 32):
        products = x[:, None, begin : begin + 32].double() * weight[None, :, begin : begin + 32].double()
        sums = [torch.zeros(rows, 40), torch.zeros(rows, 40)]
        for n in range(products.shape[2]):  # a product of two numbers of bfloat16 is exact in float64
            sums[n % 2] = (sums[n % 2].double() + products[..., n]).float()
        total = total + (sums[0] + sums[1])
    return found, total


@pytest.mark.parametrize(("rows", "inputs"), [(1, 1), (1, 700), (17, 33), (40, 700), (300, 64)])
def test_sums_in_tiles_come_about_in_the_order_of_the_manual(rows: int, inputs: int) -> None:
    assert torch.equal(*linear_in_tiles(rows, inputs))
