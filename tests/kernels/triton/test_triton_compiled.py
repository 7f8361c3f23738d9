"""Ahead-of-time compilation: decode attention and delta nets become machine code for all GPUs, without spills."""

from collections.abc import Iterator

import pytest
import torch

from baton.kernels.triton.attention_tile import context_splits
from baton.kernels.triton.delta import convolution_call
from baton.kernels.triton.launch import Device, Tile, decode_tile, prefill_tile
from baton.kernels.types import StateRuns
from baton.lab.benchmarks.triton.compile import CASES, MAY_SPILL, compiled


@pytest.fixture(autouse=True, scope="module")
def nothing_compiled_before(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def test_decode_attention_compiles_for_hopper_without_spills() -> None:
    case = next(each for each in CASES if each.name.startswith("rotated_decode bfloat16/bfloat16 128 x1"))
    rows = list(compiled(case, 90))
    assert [row.kernel for row in rows] == ["attend_part"]
    assert [row.spilled_bytes for row in rows] == [0]
    assert all(row.registers > 0 for row in rows)


def test_delta_net_compiles_for_hopper_without_spills() -> None:
    case = next(each for each in CASES if each.name == "delta net bfloat16")
    assert [(row.kernel, row.spilled_bytes) for row in compiled(case, 90)] == [("convolve", 0), ("apply_rule", 0)]


@pytest.mark.parametrize("name", ["few rows bfloat16/bfloat16 x4", "latent bfloat16/bfloat16", "sample of 128256"])
def test_kernels_of_decode_do_not_spill(name: str) -> None:
    case = next(each for each in CASES if each.name == name)
    rows = [row for row in compiled(case, 90) if row.kernel != MAY_SPILL]
    assert rows and not any(row.spilled_bytes for row in rows)


@pytest.mark.parametrize(
    ("name", "reads"), [("rotated_decode bfloat16/bfloat16 128 x1", {0}), ("few rows bfloat16", {8 + 4, 8})]
)
def test_early_kernel_waits_before_it_reads_others_results(name: str, reads: set[int]) -> None:
    """Weights may be read: of a tile of 16 KiB 8 words of 16 bytes for each thread, and 4 of the norm of its inputs."""
    case = next(each for each in CASES if each.name.startswith(name))
    assert all(call.overlaps for call in case.calls(Device(90, 132, overlaps=True)))
    assert {row.reads_before_wait for row in compiled(case, 90)} == reads
    assert {row.reads_before_wait for row in compiled(case, 80)} == {None}


def test_every_kernel_has_a_case_to_compile() -> None:
    started = {call.kernel.__name__ for case in CASES for call in case.calls(Device(90, 132))}
    assert started == {
        "apply_rule",
        "attend_chunk",
        "attend_part",
        "combine_parts",
        "convolve",
        "copy_row",
        "gate",
        "multiply_experts",
        "multiply_few",
        "multiply_rows",
        "normalise",
        "rotate_rows",
        "survey_part",
        "draw_row",
        "spell_out",
        "store_rows",
        "sum_parts",
    }


def test_large_batch_is_not_split_and_a_single_sequence_fills_the_device() -> None:
    assert context_splits(pairs=32 * 8, tiles=64, multiprocessors=132, filling=2) == 1
    assert 20 <= context_splits(pairs=8, tiles=128, multiprocessors=132, filling=2) <= 33


def test_no_more_parts_than_tiles() -> None:
    assert context_splits(1, 1, 1000, 2) == 1
    assert context_splits(1, 0, 1000, 2) == 1
    assert context_splits(1, 10_000, 1000, 2) <= 128


def test_tiles_hold_all_query_heads_of_a_kv_head() -> None:
    assert decode_tile(Device(90, 132), 128, 2, group=4).rows == 16
    assert decode_tile(Device(90, 132), 128, 2, group=71).rows == 128
    assert prefill_tile(Device(90, 132), 128, 2, rows=10_000, quantised=False) == Tile(128, 64, 8, 3)
    assert prefill_tile(Device(90, 132), 128, 2, rows=5, quantised=False).rows == 16


def test_long_prompt_is_convolved_by_many_programs() -> None:
    x, weight = (torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((4096, 8192), (8192, 4)))
    one = torch.empty(1, dtype=torch.int64, device="meta")
    states = torch.empty(1, 4, 8192, device="meta")
    call = convolution_call(x, weight, states, StateRuns(one, one, one, one, 0, (4096,)), torch.empty_like(x))
    assert call.grid[0] >= 4096 // 32
