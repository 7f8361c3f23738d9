"""State spaces: the reference against the definition token by token, and the native kernels against the reference."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from baton.kernels import reference
from baton.kernels.delta import state_space_scan
from baton.kernels.native.library import NativeLibrary
from baton.kernels.types import StateInit, StateRates, StateRuns
from tests.fixtures.delta_inputs import KEY_DIM, MOVES, PIECES, VALUE_DIM, VALUE_HEADS, Inputs, Pool, chain, runs_of

LIMITS = (0.4, 1.1)  # both are reached
Scan = Callable[..., torch.Tensor]


def scanned(compute: Scan, inputs: Inputs, states: torch.Tensor, runs: StateRuns) -> torch.Tensor:
    rates = StateRates(
        *inputs.rates, skip=torch.linspace(-1, 1, VALUE_HEADS), least_step=LIMITS[0], most_step=LIMITS[1]
    )
    return compute(inputs.query, inputs.key, inputs.value, inputs.decay, rates, states, runs)


def token_by_token(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all outputs and the last state, in float64, after the recurrence in section 2 of the paper."""
    together, skip = VALUE_HEADS // inputs.key.shape[1], torch.linspace(-1, 1, VALUE_HEADS)[:, None]
    state, out = torch.zeros(VALUE_HEADS, KEY_DIM, VALUE_DIM, dtype=torch.float64), []
    for row in range(len(inputs.query)):
        key, query = (
            each[row].double().repeat_interleave(together, 0)[:, :, None] for each in (inputs.key, inputs.query)
        )
        step = F.softplus(inputs.decay[row] + inputs.rates.bias).clamp(*LIMITS).double()[:, None]
        value = inputs.value[row].double()
        state = state * (inputs.rates.rate[:, None] * step).exp()[:, :, None] + key * (value * step)[:, None]
        out.append((query * state).sum(1) + skip * value)
    return torch.stack(out), state


def test_scan_of_runs_in_several_blocks_equals_the_recurrence() -> None:
    pool, inputs = Pool(), Inputs(sum(PIECES))
    made = scanned(reference.state_space_scan, inputs, pool.matrices, chain())
    expected, state = token_by_token(inputs)
    torch.testing.assert_close(made.double(), expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(pool.matrices[3].double(), state, atol=1e-4, rtol=1e-5)
    assert pool.pages[4:].isnan().all()


def test_native_scan_equals_the_reference(native: NativeLibrary) -> None:
    ours, wanted, inputs = Pool(), Pool(), Inputs(3 + sum(PIECES))
    for pool in (ours, wanted):
        torch.manual_seed(1)
        pool.matrices[6:] = torch.randn(pool.matrices[6:].shape)
    alone = [(6, 6, StateInit.STORED), (7, 4, StateInit.STORED), (8, 8, StateInit.AGAIN)]
    runs = runs_of(3, PIECES, [*alone, *MOVES])
    made = scanned(native.state_space_scan, inputs, ours.matrices, runs)
    expected = scanned(reference.state_space_scan, inputs, wanted.matrices, runs)
    torch.testing.assert_close(made, expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(ours.pages, wanted.pages, atol=1e-4, rtol=1e-5, equal_nan=True)


def test_native_scan_does_not_depend_on_how_rows_are_cut(native: NativeLibrary) -> None:
    inputs, whole, cut = Inputs(sum(PIECES)), Pool(), Pool()
    at_once = runs_of(0, (len(inputs.x),), [(0, 3, StateInit.ZERO)])
    made = [
        scanned(native.state_space_scan, inputs, pool.matrices, runs)
        for runs, pool in ((at_once, whole), (chain(), cut))
    ]
    assert torch.equal(*made)
    assert torch.equal(whole.matrices[3], cut.matrices[3])


@pytest.mark.parametrize("is_native", [False, True])
def test_scan_of_a_token_computed_again_changes_nothing(is_native: bool, native: NativeLibrary) -> None:
    compute = native.state_space_scan if is_native else reference.state_space_scan
    pool, inputs = Pool(), Inputs(1)
    made = scanned(compute, inputs, pool.matrices, runs_of(1, (), [(0, 0, StateInit.ZERO)]))
    before = pool.pages.clone()
    again = scanned(compute, inputs, pool.matrices, runs_of(1, (), [(0, 0, StateInit.AGAIN)]))
    assert torch.equal(again, made)
    assert torch.equal(pool.pages.nan_to_num(7.0), before.nan_to_num(7.0))


@pytest.mark.parametrize("is_native", [False, True])
def test_scan_from_a_broken_state_returns_nan(is_native: bool, native: NativeLibrary) -> None:
    compute = native.state_space_scan if is_native else reference.state_space_scan
    pool = Pool()
    pool.pages.zero_()
    assert scanned(compute, Inputs(2), pool.matrices, runs_of(0, (2,), [(0, 0, StateInit.BROKEN)])).isnan().all()


def test_scan_of_unequal_shapes_is_rejected() -> None:
    pool, inputs, runs = Pool(), Inputs(sum(PIECES)), chain()
    with pytest.raises(ValueError, match="states must be"):
        scanned(state_space_scan, inputs, pool.inputs, runs)
    inputs.query = inputs.key = torch.randn(len(inputs.x), 4, KEY_DIM)
    with pytest.raises(ValueError, match="6 heads are not a multiple of 4 groups"):
        scanned(state_space_scan, inputs, pool.matrices, runs)
