"""Stacked factors: every row gets what its own adapter adds, whatever the others in the batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.lora.adapters import AdaptedLinear
from baton.engine.lora.files import LowRank
from baton.engine.models.batch import AdapterRows, adapter_run, batch_order
from baton.engine.models.linear import DenseLinear

CPU = torch.device("cpu")
INPUTS, SIZES = 12, (8, 5)


def low_rank(rank: int, outputs: int, seed: int) -> LowRank:
    generator = torch.Generator().manual_seed(seed)
    down, up = torch.randn(rank, INPUTS, generator=generator), torch.randn(outputs, rank, generator=generator)
    return LowRank(down, up, scale=0.5)


def adapted(ranks: list[tuple[int, int]]) -> tuple[AdaptedLinear, list[torch.Tensor]]:
    """Adapters with a rank for each module, 0 where they leave it alone; and the matrix that each should amount to."""
    base = DenseLinear(torch.randn(sum(SIZES), INPUTS, generator=torch.Generator().manual_seed(0)))
    linear = AdaptedLinear(base, SIZES, INPUTS, torch.float32, CPU)
    matrices = [base.weight]
    for number, of_modules in enumerate(ranks, start=1):
        factors = [
            low_rank(rank, size, seed=number) if rank else None for rank, size in zip(of_modules, SIZES, strict=True)
        ]
        for module, each in zip(linear.modules, factors, strict=True):
            module.replace(module.appended(each))
        products = [
            torch.zeros(size, INPUTS) if each is None else each.scale * each.up @ each.down
            for each, size in zip(factors, SIZES, strict=True)
        ]
        matrices.append(base.weight + torch.cat(products))
    return linear, matrices


def rows_of(numbers: list[int]) -> AdapterRows | None:
    """Of the adapter of every row."""
    run = adapter_run(numbers)
    return AdapterRows.of(run, numbers[run], torch.tensor(numbers[run]))


@settings(max_examples=60, deadline=None)
@given(
    ranks=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=5),
    rows=st.lists(st.tuples(st.booleans(), st.integers(0, 5)), min_size=1, max_size=12),
)
def test_each_row_is_multiplied_by_its_adapters_matrix(
    ranks: list[tuple[int, int]], rows: list[tuple[bool, int]]
) -> None:
    linear, matrices = adapted(ranks)
    chunks = [(is_long, number % len(matrices)) for is_long, number in rows]
    numbers = [number for _, number in sorted(chunks, key=lambda chunk: batch_order(*chunk))]
    x = torch.randn(len(numbers), INPUTS, generator=torch.Generator().manual_seed(1))
    y = linear(x, rows_of(numbers))
    wanted = torch.stack([matrices[number] @ row for number, row in zip(numbers, x, strict=True)])
    torch.testing.assert_close(y, wanted, atol=1e-5, rtol=1e-5)


def test_nonfinite_row_spoils_no_other() -> None:
    linear, matrices = adapted([(2, 3), (4, 1), (1, 1)])
    x = torch.randn(3, INPUTS)
    x[1] = torch.inf
    y = linear(x, rows_of([1, 2, 3]))
    assert not y[1].isfinite().any()
    torch.testing.assert_close(y[[0, 2]], torch.stack([matrices[1] @ x[0], matrices[3] @ x[2]]))


def test_batch_without_adapters_does_not_touch_the_factors() -> None:
    linear, _ = adapted([(2, 3)])
    linear.modules = ()  # whoever asks them fails
    x = torch.randn(4, INPUTS)
    assert rows_of([0, 0, 0, 0]) is None
    assert linear(x, None).shape == (4, sum(SIZES))


def test_rows_with_adapters_stand_side_by_side_in_any_batch() -> None:
    with pytest.raises(ValueError, match="not contiguous"):
        rows_of([1, 0, 2])
    chunks = [(long, adapter) for long in (True, False) for adapter in (2, 0, 1, 0)]
    ordered = sorted(chunks, key=lambda chunk: batch_order(*chunk))
    assert [long for long, _ in ordered] == [False] * 4 + [True] * 4
    rows = rows_of([adapter for _, adapter in ordered])
    assert rows is not None
    assert (rows.rows, rows.lowest, rows.highest) == (slice(2, 6), 1, 2)
