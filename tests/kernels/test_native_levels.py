"""Levels of the instruction set that few processors have: they compile anywhere, and do without where they must."""

import os
import subprocess
from pathlib import Path

import pytest
import torch

from baton.kernels.native.build import (
    COMPILE_TIMEOUT_S,
    EMULATED_AMX,
    FLAGS,
    LEVELS,
    find_compiler,
    pieces,
    processor_level,
)
from baton.kernels.native.library import NativeLibrary
from baton.kernels.packed_weight import Stored, pack
from tests.fixtures.native_levels import EMULATED_BF16, TESTED, native_at


@pytest.mark.parametrize(
    ("level", "piece", "how"),
    [
        ("AMX_BF16", "attention", "-O0"),
        ("AMX_BF16", "others", "-O0"),
        ("AVX512_BF16", "others", "-fsyntax-only"),  # of its instructions AMX has all
    ],
)
def test_levels_of_few_processors_compile_on_any(level: str, piece: str, how: str, tmp_path: Path) -> None:
    if level == processor_level():
        assert level in TESTED  # it runs in the other tests
        return
    sources = [part for source in pieces()[piece] for part in ("-include", str(source))]
    command = [find_compiler(), *FLAGS, *LEVELS[level], *sources, how, "-c", "-x", "c++", os.devnull]
    compiled = subprocess.run(
        [*command, "-o", str(tmp_path / "made.o")], capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S
    )
    assert (compiled.returncode, compiled.stderr) == (0, "")


@pytest.fixture(scope="module")
def emulated() -> NativeLibrary:
    if "AVX512_VNNI" not in TESTED:
        pytest.skip("needs a processor with AVX-512")
    return native_at(EMULATED_AMX)


def test_level_of_amx_multiplies_without_where_the_system_refuses_it(emulated: NativeLibrary) -> None:
    """All tests of the emulated level below do so; here, that they do."""
    weight, x = pack(torch.randn(70, 130), Stored.ROUNDING, None), torch.randn(33, 130)
    with_tiles, without = (each.packed_linear(x, weight) for each in (emulated, native_at(EMULATED_BF16)))
    torch.testing.assert_close(without, with_tiles, atol=1e-3, rtol=1e-3)
    assert not torch.equal(without, with_tiles), "sums of tiles come about in another order"
    if "AVX512_BF16" in TESTED:
        assert torch.equal(without, native_at("AVX512_BF16").packed_linear(x, weight))


@pytest.mark.parametrize(("rows", "inputs"), [(1, 1), (1, 700), (17, 33), (40, 700), (300, 64)])
def test_tile_sums_follow_the_order_of_the_manual(emulated: NativeLibrary, rows: int, inputs: int) -> None:
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
