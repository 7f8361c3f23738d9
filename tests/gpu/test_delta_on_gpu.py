"""Gated delta nets on the device: against the reference, and the same bits however rows are cut."""

from dataclasses import replace

import pytest
import torch

from baton.kernels import reference
from baton.kernels.delta import causal_convolution, gated_delta_rule
from baton.kernels.types import DeltaRates, StateInit, StateRuns
from tests.fixtures.delta_inputs import PIECES, Inputs, Pool, chain, runs_of
from tests.gpu.device import CUDA, needs_gpu

pytestmark = needs_gpu
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}


def on_device(runs: StateRuns) -> StateRuns:
    moved = {name: getattr(runs, name).to(CUDA) for name in ("starts", "sources", "destinations", "begins")}
    return replace(runs, **moved)


def computed(inputs: Inputs, pool: Pool, runs: StateRuns) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, value = (each.to(CUDA) for each in (inputs.query, inputs.key, inputs.value))
    decay, beta = inputs.decay.to(CUDA), inputs.beta.to(CUDA)
    rates = DeltaRates(*(each.to(CUDA) for each in inputs.rates))
    there = on_device(runs)
    made = gated_delta_rule(query, key, value, decay, beta, rates, pool.matrices, there)
    return made.cpu(), causal_convolution(inputs.x.to(CUDA), inputs.weight.to(CUDA), pool.inputs, there).cpu()


@pytest.mark.parametrize("dtype", ROUNDING)
def test_sequence_in_several_blocks_equals_the_reference(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    wanted, inputs = Pool(), Inputs(sum(PIECES), dtype)
    ours = Pool(wanted.pages.to(CUDA))
    made, seen = computed(inputs, ours, chain())
    expected = inputs.delta(reference.gated_delta_rule, wanted.matrices, chain())
    torch.testing.assert_close(made, expected, atol=4 * ROUNDING[dtype], rtol=0)
    expected = reference.causal_convolution(inputs.x, inputs.weight, wanted.inputs, chain())
    torch.testing.assert_close(seen, expected, atol=ROUNDING[dtype], rtol=ROUNDING[dtype])
    torch.testing.assert_close(ours.pages.cpu(), wanted.pages, atol=4 * ROUNDING[dtype], rtol=0, equal_nan=True)


def test_no_bit_depends_on_how_rows_are_cut() -> None:
    torch.manual_seed(0)
    inputs = Inputs(sum(PIECES))
    whole, cut = (Pool(Pool().pages.to(CUDA)) for _ in range(2))
    at_once = computed(inputs, whole, runs_of(0, (len(inputs.x),), [(0, 3, StateInit.ZERO)]))
    assert all(map(torch.equal, at_once, computed(inputs, cut, chain())))
    assert torch.equal(whole.matrices[3], cut.matrices[3])
    assert torch.equal(whole.inputs[3], cut.inputs[3])
