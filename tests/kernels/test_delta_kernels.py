"""Gated delta nets: the reference against the definition token by token, and the native kernels against both."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from baton.kernels import reference
from baton.kernels.delta import causal_convolution, gated_delta_rule
from baton.kernels.native.library import NativeLibrary
from baton.kernels.types import StateInit
from tests.fixtures.delta_inputs import (
    CHANNELS,
    KERNEL,
    KEY_DIM,
    KEY_HEADS,
    MOVES,
    PIECES,
    VALUE_DIM,
    VALUE_HEADS,
    Inputs,
    Pool,
    chain,
    runs_of,
)


def token_by_token(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """As section 3.1 defines it, in float64: all that is read, and the last state."""
    together = VALUE_HEADS // KEY_HEADS
    query, key = (F.normalize(each.double(), dim=-1) for each in (inputs.query, inputs.key))
    state, out = torch.zeros(VALUE_HEADS, KEY_DIM, VALUE_DIM, dtype=torch.float64), []
    for row in range(len(query)):
        keys, queries = (each[row].repeat_interleave(together, 0)[:, :, None] for each in (key, query))
        decay = inputs.rates.rate * F.softplus(inputs.decay[row] + inputs.rates.bias)
        state = state * decay.double().exp()[:, None, None]
        change = inputs.value[row].double()[:, None] - (keys * state).sum(1, keepdim=True)
        state = state + keys * change * inputs.beta[row].double().sigmoid()[:, None, None]
        out.append((queries * state).sum(1) / KEY_DIM**0.5)
    return torch.stack(out), state


def test_pieces_in_several_blocks_are_one_sequence() -> None:
    pool, inputs, runs = Pool(), Inputs(sum(PIECES)), chain()
    made = inputs.delta(reference.gated_delta_rule, pool.matrices, runs)
    expected, state = token_by_token(inputs)
    torch.testing.assert_close(made.double(), expected, atol=2e-5, rtol=0)
    torch.testing.assert_close(pool.matrices[3].double(), state, atol=2e-5, rtol=0)
    seen = reference.causal_convolution(inputs.x, inputs.weight, pool.inputs, runs)
    whole = F.conv1d(inputs.x.T[None], inputs.weight[:, None], padding=KERNEL - 1, groups=CHANNELS)
    torch.testing.assert_close(seen, F.silu(whole[0].T[: len(inputs.x)]), atol=1e-5, rtol=0)
    assert torch.equal(pool.inputs[3], inputs.x[-KERNEL:])
    assert pool.pages[4:].isnan().all()
    assert pool.pages[:, -5:].isnan().all()


def test_native_kernels_equal_the_reference(native: NativeLibrary) -> None:
    ours, wanted, inputs = Pool(), Pool(), Inputs(3 + sum(PIECES))
    for pool in (ours, wanted):
        torch.manual_seed(1)
        pool.matrices[6:] = torch.randn(pool.matrices[6:].shape)
        pool.inputs[6:] = torch.randn(pool.inputs[6:].shape)
    alone = [(6, 6, StateInit.STORED), (7, 4, StateInit.STORED), (8, 8, StateInit.AGAIN)]
    runs = runs_of(3, PIECES, [*alone, *MOVES])
    made = inputs.delta(native.gated_delta_rule, ours.matrices, runs)
    expected = inputs.delta(reference.gated_delta_rule, wanted.matrices, runs)
    torch.testing.assert_close(made, expected, atol=2e-5, rtol=0)
    made = native.causal_convolution(inputs.x, inputs.weight, ours.inputs, runs)
    expected = reference.causal_convolution(inputs.x, inputs.weight, wanted.inputs, runs)
    torch.testing.assert_close(made, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours.pages, wanted.pages, atol=2e-5, rtol=0, equal_nan=True)


def test_natively_no_bit_depends_on_how_rows_are_cut(native: NativeLibrary) -> None:
    inputs, whole, cut = Inputs(sum(PIECES)), Pool(), Pool()
    at_once = runs_of(0, (len(inputs.x),), [(0, 3, StateInit.ZERO)])
    made = [
        inputs.delta(native.gated_delta_rule, pool.matrices, runs) for runs, pool in ((at_once, whole), (chain(), cut))
    ]
    assert torch.equal(*made)
    seen = [
        native.causal_convolution(inputs.x, inputs.weight, pool.inputs, runs)
        for runs, pool in ((at_once, whole), (chain(), cut))
    ]
    assert torch.equal(*seen)
    assert torch.equal(whole.matrices[3], cut.matrices[3])
    assert torch.equal(whole.inputs[3], cut.inputs[3])


@pytest.mark.parametrize("is_native", [False, True])
def test_convolution_with_bias_and_without_activation_equals_pytorch(is_native: bool, native: NativeLibrary) -> None:
    compute, inputs, bias = native if is_native else reference, Inputs(sum(PIECES)), torch.randn(CHANNELS)
    whole = F.conv1d(inputs.x.T[None], inputs.weight[:, None], bias, padding=KERNEL - 1, groups=CHANNELS)
    plain = whole[0].T[: len(inputs.x)]
    for activates, expected in ((False, plain), (True, F.silu(plain))):
        made = compute.causal_convolution(inputs.x, inputs.weight, Pool().inputs, chain(), bias, activates)
        torch.testing.assert_close(made, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("is_native", [False, True])
def test_recomputed_token_reads_the_same_state_and_changes_nothing(is_native: bool, native: NativeLibrary) -> None:
    of = native if is_native else reference
    pool, inputs = Pool(), Inputs(1)
    first, again = (runs_of(1, (), [(0, 0, how)]) for how in (StateInit.ZERO, StateInit.AGAIN))
    made = inputs.delta(of.gated_delta_rule, pool.matrices, first)
    seen = of.causal_convolution(inputs.x, inputs.weight, pool.inputs, first)
    before = pool.pages.clone()
    assert torch.equal(inputs.delta(of.gated_delta_rule, pool.matrices, again), made)
    assert torch.equal(of.causal_convolution(inputs.x, inputs.weight, pool.inputs, again), seen)
    assert torch.equal(pool.pages.nan_to_num(7.0), before.nan_to_num(7.0))


@pytest.mark.parametrize("is_native", [False, True])
def test_state_after_other_tokens_gives_no_result(is_native: bool, native: NativeLibrary) -> None:
    of = native if is_native else reference
    pool, inputs = Pool(), Inputs(2)
    pool.pages.zero_()
    runs = runs_of(0, (2,), [(0, 0, StateInit.BROKEN)])
    assert inputs.delta(of.gated_delta_rule, pool.matrices, runs).isnan().all()
    assert of.causal_convolution(inputs.x, inputs.weight, pool.inputs, runs)[0].isnan().all()


def test_mismatched_shapes_are_rejected() -> None:
    pool, inputs, runs = Pool(), Inputs(sum(PIECES)), chain()
    with pytest.raises(ValueError, match="states must be"):
        causal_convolution(inputs.x, inputs.weight, pool.matrices, runs)
    with pytest.raises(ValueError, match="bias must be"):
        causal_convolution(inputs.x, inputs.weight, pool.inputs, runs, inputs.weight[1:, 0])
    with pytest.raises(ValueError, match="sources must be"):
        inputs.delta(gated_delta_rule, pool.matrices, replace(runs, sources=runs.sources[1:]))
    with pytest.raises(ValueError, match="6 value heads are not a multiple of 4 key heads"):
        inputs.query = inputs.key = torch.randn(len(inputs.x), 4, KEY_DIM)
        inputs.delta(gated_delta_rule, pool.matrices, runs)
