"""Quantised projections that two ranks share: together they compute what one does, but for the rounding of the sums."""

import threading
from pathlib import Path

import pytest
import torch

from baton.engine.config.model_config import ModelError
from baton.engine.models.linear import DenseLinear, Linear, MatmulBackend, PackedLinear
from baton.engine.parallel.collectives import Collectives
from baton.engine.parallel.model import ScaledLinear, SummedLinear, _scaled
from baton.engine.parallel.shard import Shard
from baton.engine.weights.formats import WeightFormat
from baton.engine.weights.read import CheckpointWeights
from tests.fixtures.paged import CPU

OUTPUTS, INPUTS, ROWS = 70, 192, 5
UNGROUPED_INPUTS = 200  # int8 has no groups of inputs if a rank's part is not a multiple of 32
NAME = "model.layers.0.mlp.down_proj"
EPS = 2.0**-24  # of a float32 that is rounded once


class Stored:
    """A checkpoint of one projection."""

    def __init__(self, inputs: int = INPUTS) -> None:
        draw = torch.Generator().manual_seed(1)
        self.weight, self.bias = torch.randn(OUTPUTS, inputs, generator=draw), torch.randn(OUTPUTS, generator=draw)
        self.weight[:, : inputs // 2] *= 5  # the largest of each row is one rank's

    def has(self, name: str) -> bool:
        return True

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.weight.shape)

    def take(self, name: str, dtypes: tuple[torch.dtype, ...], *shape: int) -> torch.Tensor:
        stored = self.bias if name.endswith("bias") else self.weight
        assert shape == tuple(stored.shape)
        return stored


def read(format: WeightFormat, packed: bool, rank: int = 0, ranks: int = 1, inputs: int = INPUTS) -> Linear:
    source = CheckpointWeights(Stored(inputs), format, None, torch.float32, Shard(rank, ranks))
    backend = MatmulBackend(CPU, torch.float32, packed)
    return backend.linear(source.weight([NAME], (OUTPUTS,), inputs, bias=True))


def inputs_of(rows: int = ROWS, inputs: int = INPUTS) -> torch.Tensor:
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(2))
    x[:, inputs // 2 :] *= 7  # the largest of each row is the other rank's
    return x


def on_two_ranks(format: WeightFormat, packed: bool, x: torch.Tensor, meeting: Path) -> list[torch.Tensor]:
    """What each rank has in the end."""
    found: dict[int, torch.Tensor] = {}

    def compute(rank: int) -> None:
        collectives = Collectives(Shard(rank, 2), meeting, CPU)
        part = _scaled(read(format, packed, rank, 2, x.shape[1]), collectives)
        if x.shape[1] == UNGROUPED_INPUTS:
            assert isinstance(part, ScaledLinear) == packed
        found[rank] = SummedLinear(part, collectives)(x.chunk(2, dim=1)[rank].contiguous())
        collectives.close()

    threads = [threading.Thread(target=compute, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [found[rank] for rank in range(2)]


@pytest.mark.usefixtures("native_kernels")
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("format", "inputs"),
    [
        (WeightFormat.INT8, UNGROUPED_INPUTS),
        *((each, INPUTS) for each in (WeightFormat.INT8, WeightFormat.INT4, WeightFormat.FP8)),
    ],
)
def test_two_ranks_compute_what_one_does(format: WeightFormat, inputs: int, packed: bool, tmp_path: Path) -> None:
    """Weights and rounded inputs are the same numbers. What differs is the order in which products are summed up.

    Packed int8 without groups: sums of integers are exact. Each part is rounded when it is made a float and by each of
    two scales, the bias and the other part are added: on either side five roundings of no more than the sum of all
    sizes. In the other forms a sum is made of at most as many floats as there are inputs, each rounded once; errors
    that are independent grow with the square root of their number, and no more than four times that is allowed.
    """
    x, stored = inputs_of(inputs=inputs), Stored(inputs)
    whole = read(format, packed, inputs=inputs)(x)
    one, other = on_two_ranks(format, packed, x, tmp_path / "meeting")
    sizes = x.abs() @ stored.weight.abs().T + stored.bias.abs()  # of all that is summed up
    roundings = 2 * 5 if packed and inputs == UNGROUPED_INPUTS else 4 * inputs**0.5
    assert torch.equal(one, other)
    assert ((one - whole).abs() <= roundings * EPS * sizes).all()


@pytest.mark.parametrize("inputs", [INPUTS, UNGROUPED_INPUTS])
@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf])
@pytest.mark.usefixtures("native_kernels")
def test_what_is_not_finite_on_one_rank_shows_on_all(spoilt: float, inputs: int, tmp_path: Path) -> None:
    x = inputs_of(3, inputs)
    x[1, 0] = spoilt
    for found in on_two_ranks(WeightFormat.INT8, True, x, tmp_path / "meeting"):
        assert found.isfinite().all(1).tolist() == [True, False, True]


@pytest.mark.parametrize(("inputs", "kind"), [(96, "quantised"), (90, "plain")])
def test_groups_that_ranks_would_cut_are_refused_and_where_there_are_none_weights_stay_plain(
    inputs: int, kind: str
) -> None:
    if kind == "plain":
        for ranks in (1, 2):
            assert isinstance(read(WeightFormat.INT4, False, 0, ranks, inputs), DenseLinear)
        return
    with pytest.raises(ModelError, match=f"{NAME} has 48 inputs on each rank, and int4 needs a multiple of 32"):
        read(WeightFormat.INT4, False, 0, 2, inputs)
    assert isinstance(read(WeightFormat.INT4, True, 0, 1, inputs), PackedLinear)
