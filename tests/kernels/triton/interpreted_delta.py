"""The Triton kernels of gated delta nets: against the reference, and against themselves however rows are cut."""

from collections.abc import Iterator

import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder

from baton.kernels import reference
from baton.kernels.delta import causal_convolution, gated_delta_rule
from baton.kernels.dispatch import on_the_interpreter
from baton.kernels.triton import delta
from baton.kernels.triton.launch import DELTA_CHANNELS
from baton.kernels.types import StateInit, StateRuns
from tests.fixtures.delta_inputs import CHANNELS, KERNEL, MOVES, Inputs, Pool, chain, runs_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy meets the poison
SHORT = (1, 2, 4, 3)  # the first of them shorter than the convolution sees
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In few tiles, since the interpreter takes its time for each."""
    monkeypatch.setattr(delta, "DELTA_VALUES", 64)
    monkeypatch.setattr(delta, "DELTA_ROWS", 4)
    with on_the_interpreter():
        yield


def computed(inputs: Inputs, pool: Pool, runs: StateRuns) -> tuple[torch.Tensor, torch.Tensor]:
    made = inputs.delta(gated_delta_rule, pool.matrices, runs)
    return made, causal_convolution(inputs.x, inputs.weight, pool.inputs, runs)


@pytest.mark.parametrize("dtype", ROUNDING)
def test_every_way_to_begin_equals_the_reference(dtype: torch.dtype) -> None:
    assert DELTA_CHANNELS < CHANNELS
    ours, wanted, inputs = Pool(), Pool(), Inputs(3 + sum(SHORT), dtype)
    for pool in (ours, wanted):
        torch.manual_seed(1)
        pool.matrices[6:] = torch.randn(pool.matrices[6:].shape)
        pool.inputs[6:] = torch.randn(pool.inputs[6:].shape)
    alone = [(6, 6, StateInit.STORED), (7, 4, StateInit.STORED), (8, 8, StateInit.AGAIN)]
    runs = runs_of(3, SHORT, [*alone, *MOVES])
    made, seen = computed(inputs, ours, runs)
    expected = inputs.delta(reference.gated_delta_rule, wanted.matrices, runs)
    torch.testing.assert_close(made, expected, atol=2 * ROUNDING[dtype], rtol=0)
    expected = reference.causal_convolution(inputs.x, inputs.weight, wanted.inputs, runs)
    torch.testing.assert_close(seen, expected, atol=ROUNDING[dtype], rtol=ROUNDING[dtype])
    torch.testing.assert_close(ours.pages, wanted.pages, atol=2 * ROUNDING[dtype], rtol=0, equal_nan=True)


def test_no_bit_depends_on_how_rows_are_cut() -> None:
    inputs, whole, cut = Inputs(sum(SHORT)), Pool(), Pool()
    at_once = computed(inputs, whole, runs_of(0, (len(inputs.x),), [(0, 3, StateInit.ZERO)]))
    in_pieces = computed(inputs, cut, chain(SHORT))
    assert all(map(torch.equal, at_once, in_pieces))
    assert torch.equal(whole.matrices[3], cut.matrices[3])
    assert torch.equal(whole.inputs[3], cut.inputs[3])
    by_step = Pool()  # from a state in the pool in place of one that the kernel has at hand
    for row in range(len(inputs.x)):
        begins = (0, 0, StateInit.STORED if row else StateInit.ZERO)
        part = inputs.row(row)
        made = computed(part, by_step, runs_of(1, (), [begins]))
        assert all(torch.equal(whole_of[row], own[0]) for whole_of, own in zip(at_once, made, strict=True))
    assert torch.equal(by_step.pages[0].nan_to_num(7.0), whole.pages[3].nan_to_num(7.0))


@pytest.mark.parametrize("activates", [False, True])
def test_convolution_with_bias_equals_the_reference(activates: bool) -> None:
    inputs, ours, wanted, runs = Inputs(sum(SHORT)), Pool(), Pool(), chain(SHORT)
    bias = torch.randn(CHANNELS)
    made = causal_convolution(inputs.x, inputs.weight, ours.inputs, runs, bias, activates)
    expected = reference.causal_convolution(inputs.x, inputs.weight, wanted.inputs, runs, bias, activates)
    torch.testing.assert_close(made, expected, atol=1e-5, rtol=0)


def test_programs_run_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts, one of which goes on in the block that it begins from, beside an answer."""
    inputs, rows = Inputs(1 + 10 + 9), (1, 2, 7, 9)
    moves = [(6, 6, StateInit.STORED), (0, 0, StateInit.STORED), (0, 1, StateInit.STORED), (1, 2, StateInit.STORED)]
    runs = runs_of(1, rows, [*moves, (7, 3, StateInit.STORED)])
    place, found = InterpreterBuilder.set_grid_idx, []
    for step in (1, -1):
        pool = Pool()
        torch.manual_seed(1)
        for page in (0, 6, 7):
            pool.pages[page] = torch.randn(pool.pages[page].shape)
        call = delta.convolution_call(inputs.x, inputs.weight, pool.inputs, runs, torch.empty_like(inputs.x))
        order = list(range(call.grid[0]))[::step]
        with monkeypatch.context() as patched:
            patched.setattr(
                InterpreterBuilder, "set_grid_idx", lambda self, x, y, z, order=order: place(self, order[x], y, z)
            )
            call.start()
        found.append((call.arguments["output"], pool.inputs.nan_to_num(7.0)))
    assert all(map(torch.equal, *found))


def test_sequence_continues_in_its_first_block() -> None:
    inputs, pool, wanted = Inputs(4), Pool(), Pool()
    for each in (pool, wanted):
        torch.manual_seed(1)
        each.pages[0] = torch.randn(each.pages[0].shape)
    runs = runs_of(0, (1, 3), [(0, 0, StateInit.STORED), (0, 1, StateInit.STORED)])
    made, seen = computed(inputs, pool, runs)
    torch.testing.assert_close(made, inputs.delta(reference.gated_delta_rule, wanted.matrices, runs), atol=2e-5, rtol=0)
    expected = reference.causal_convolution(inputs.x, inputs.weight, wanted.inputs, runs)
    torch.testing.assert_close(seen, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(pool.pages, wanted.pages, atol=2e-5, rtol=0, equal_nan=True)


def test_recomputed_token_changes_nothing_and_broken_state_gives_nothing() -> None:
    inputs, pool = Inputs(1), Pool()
    first = computed(inputs, pool, runs_of(1, (), [(0, 0, StateInit.ZERO)]))
    before = pool.pages.clone()
    again = computed(inputs, pool, runs_of(1, (), [(0, 0, StateInit.AGAIN)]))
    assert all(map(torch.equal, first, again))
    assert torch.equal(pool.pages.nan_to_num(7.0), before.nan_to_num(7.0))
    broken = computed(inputs, pool, runs_of(1, (), [(0, 1, StateInit.BROKEN)]))
    assert all(bool(each.isnan().all()) for each in broken)


def test_offsets_of_states_past_32_bits_are_right() -> None:
    """Memory is there only where it is touched."""
    block, inputs, near = 2**13 + 1, Inputs(2), Pool()
    stride = 2**18
    far = torch.empty((block + 1) * stride).view(block + 1, stride)
    pages = near.pages.shape[1]
    assert block * stride > 2**31
    both = []
    for number, whole in ((0, near.pages), (block, far[:, :pages])):
        pool = Pool(whole)
        both.append(computed(inputs, pool, runs_of(0, (2,), [(number, number, StateInit.ZERO)])))
        both.append((pool.matrices[number], pool.inputs[number]))
    assert all(map(torch.equal, both[0], both[2]))
    assert all(map(torch.equal, both[1], both[3]))
    assert pool.inputs.shape[1] == KERNEL
