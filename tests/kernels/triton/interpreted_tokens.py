"""Sampling and quantised weights in Triton against their references."""

from contextlib import nullcontext

import pytest
import torch

from baton.kernels import reference
from baton.kernels.dispatch import on_the_interpreter
from baton.kernels.experts import expert_linear
from baton.kernels.linear import dequantise_weight, quantised_linear
from baton.kernels.sampling import no_samples, sample_tokens
from baton.kernels.triton.launch import SAMPLE_TOKENS, Device
from baton.kernels.triton.linear import linear_calls
from baton.kernels.triton.sample import sample_calls
from baton.kernels.types import ExpertWeight, QuantisedWeight, sorted_pairs
from tests.fixtures.sampled import by_reference

VOCAB = 9300  # of five parts
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy meets -inf


def check_samples(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> None:
    rows = len(logits)
    uniform = torch.rand(rows, dtype=torch.float64)
    arguments = (
        logits,
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
        uniform,
    )
    expected = by_reference(*arguments)
    with on_the_interpreter():
        found = sample_tokens(*arguments)
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(0.0, 0, 1.0), (1.0, 0, 1.0), (0.6, 20, 1.0), (0.7, 0, 0.9), (1.3, 50, 0.8), (1.0, 1, 1.0), (1.0, 0, 0.0)],
)
def test_tokens_and_logprobs_equal_the_reference(temperature: float, top_k: int, top_p: float) -> None:
    check_samples(torch.randn(2, VOCAB) * 3, temperature, top_k, top_p)


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.9), (7, 1.0), (7, 0.5), (0, 0.9999)])
@pytest.mark.parametrize("width", [0.0, 0.01])
def test_filters_beyond_the_copied_tokens_scan_the_row(width: float, top_k: int, top_p: float) -> None:
    """Of tokens that are as likely, or nearly."""
    check_samples((torch.randn(2, VOCAB) * width).bfloat16().float() + 3, 0.8, top_k, top_p)


@pytest.mark.parametrize(("top_k", "top_p", "most"), [(5, 1.0, 60), (0, 0.9, 2500)])
def test_only_tokens_that_a_filter_may_keep_are_looked_through(top_k: int, top_p: float, most: int) -> None:
    logits = torch.randn(1, VOCAB) * 3
    rows = (torch.ones(1), torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([0.5]).double())
    survey, draw = sample_calls(logits, *rows, False, no_samples(1, torch.device("cpu")))
    draw.arguments["kept_places"].fill_(-1)
    survey.start()
    draw.start()
    copied = draw.arguments["kept_places"][0]
    copied = copied[copied >= 0].tolist()
    probabilities, likeliest = logits[0].softmax(0).sort(descending=True)
    kept = top_k or int((probabilities.cumsum(0) < top_p).sum()) + 1
    assert set(likeliest[:kept].tolist()) <= set(copied)
    assert copied == sorted(copied) and len(copied) < most


@pytest.mark.parametrize("top_k", [4, 5, 6, 200])
def test_more_tokens_than_parts_are_kept(top_k: int) -> None:
    check_samples(torch.randn(2, VOCAB) * 3, 0.8, top_k, 0.9)


@pytest.mark.parametrize("interpreted", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_shorter_logits_are_sampled_like_widened_ones(dtype: torch.dtype, interpreted: bool) -> None:
    logits = (torch.randn(3, 300) * 3).to(dtype)
    draws = (
        torch.tensor([0.0, 0.7, 1.0]),
        torch.tensor([0, 20, 0]),
        torch.tensor([1.0, 0.9, 1.0]),
        torch.tensor([0.5, 0.2, 0.9], dtype=torch.float64),
    )
    expected = by_reference(logits.float(), *draws)
    with on_the_interpreter() if interpreted else nullcontext():
        found = sample_tokens(logits, *draws)
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.5), (7, 1.0), (7, 0.6), (0, 0.999)])
def test_ties_at_the_boundary_are_kept_like_the_reference(top_k: int, top_p: float) -> None:
    check_samples((torch.randn(3, 300) * 2).round(), 1.0, top_k, top_p)


def test_banned_tokens_are_never_drawn() -> None:
    logits = torch.randn(2, VOCAB)
    logits[:, torch.randperm(VOCAB)[:-3]] = -torch.inf
    check_samples(logits, 1.0, 0, 0.95)
    check_samples(logits, 1.0, 20, 1.0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_nonfinite_row_is_reported_and_spoils_no_other(bad: float) -> None:
    logits = torch.randn(2, 70)
    logits[0, 5] = bad
    if bad == -torch.inf:
        logits[0] = bad
    rows = (torch.ones(2), torch.zeros(2, dtype=torch.int64), torch.ones(2), torch.full((2,), 0.5, dtype=torch.float64))
    with on_the_interpreter():
        found = sample_tokens(logits, *rows)
    assert bool(found.logprobs[0].isnan())
    assert int(found.token_ids[1]) == int(by_reference(logits[1:], *(each[1:] for each in rows)).token_ids)


def test_banned_token_spoils_a_row_that_may_ban_none() -> None:
    logits = torch.tensor([[1.0, -torch.inf], [1.0, 0.0]])
    rows = (torch.zeros(2), torch.zeros(2, dtype=torch.int64), torch.ones(2), torch.zeros(2, dtype=torch.float64))
    for may_ban, expected in ((True, [False, False]), (False, [True, False])):
        with on_the_interpreter():
            assert sample_tokens(logits, *rows, may_ban=may_ban).logprobs.isnan().tolist() == expected


@pytest.mark.parametrize("number", [0.0, 0.3, 0.5, 0.999, 1 - 2**-53])
def test_sampled_token_is_where_partial_sums_say(number: float) -> None:
    """Also where parts have no mass: before, between and behind those that have."""
    logits = torch.full((1, 6 * SAMPLE_TOKENS), -torch.inf)
    logits[0, [SAMPLE_TOKENS + 7, 2 * SAMPLE_TOKENS - 1, 4 * SAMPLE_TOKENS]] = torch.tensor([0.0, 1.0, 0.5])
    rows = (torch.ones(1), torch.zeros(1, dtype=torch.int64), torch.ones(1), torch.tensor([number]).double())
    with on_the_interpreter():
        found = sample_tokens(logits, *rows)
    expected = by_reference(logits, *rows)
    assert found.token_ids.tolist() == expected.token_ids.tolist()


def weights(outputs: int, inputs: int, groups: int) -> dict[str, QuantisedWeight]:
    scales = torch.rand(outputs) + 0.1
    return {
        "int8": QuantisedWeight(torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8), scales),
        "fp8": QuantisedWeight((torch.randn(outputs, inputs) * 50).to(torch.float8_e4m3fn), scales),
        "int4": QuantisedWeight(
            torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8),
            (torch.rand(outputs, groups) + 0.1).half(),
            torch.randint(0, 256, (outputs, groups), dtype=torch.uint8),
        ),
        "fp4": QuantisedWeight(
            torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8),
            torch.ldexp(torch.ones(outputs, groups), torch.randint(-9, 2, (outputs, groups))).bfloat16(),
        ),
    }


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4", "fp4"])
@pytest.mark.parametrize(("inputs", "groups", "dtype"), [(128, 4, torch.bfloat16), (96, 3, torch.float32)])
def test_quantised_linear_equals_the_reference(kind: str, inputs: int, groups: int, dtype: torch.dtype) -> None:
    weight = weights(66, inputs, groups)[kind]
    x, bias = torch.randn(3, inputs).to(dtype), torch.randn(66).to(dtype)
    expected = reference.quantised_linear(x, weight, bias)
    with on_the_interpreter():
        found = quantised_linear(x, weight, bias)
    largest = float(expected.abs().max())
    tolerance = largest * (1e-5 if dtype == torch.float32 else 2.0**-7)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)


def test_inputs_in_parts_are_summed() -> None:
    weight, x = weights(20, 1100, 1)["int8"], torch.randn(2, 1100)
    output = torch.full((2, 20), torch.nan)
    calls = linear_calls(x, weight, None, output, Device(90, 132))
    assert len(calls) == 2
    for call in calls:
        call.start()
    torch.testing.assert_close(output, reference.quantised_linear(x, weight, None), rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4", "fp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_spelled_out_as_the_reference_does(kind: str, dtype: torch.dtype) -> None:
    weight = weights(3, 96, 3)[kind]
    with on_the_interpreter():
        found = dequantise_weight(weight, dtype)
    torch.testing.assert_close(found, reference.dequantise_weight(weight, dtype), atol=0, rtol=0)


@pytest.mark.parametrize("kind", ["plain", "int8", "fp8", "int4", "fp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_go_through_their_assigned_experts(kind: str, dtype: torch.dtype) -> None:
    experts, outputs, inputs = 5, 22, 96
    plain = torch.randn(experts * outputs, inputs).to(dtype)
    weight = ExpertWeight(plain if kind == "plain" else weights(experts * outputs, inputs, 3)[kind], experts)
    chosen = torch.stack([torch.randperm(experts - 1)[:2] for _ in range(19)])  # nobody takes the last one
    chosen[:, 0], chosen[:17, 1] = 3, 0  # more than one tile has rows for
    pairs = sorted_pairs(chosen, experts)
    assert pairs.starts.tolist()[-2:] == [38, 38]
    x = torch.randn(19, inputs).to(dtype)
    x[7] = torch.nan  # reaches its own pairs only
    expected = reference.expert_linear(x, weight, pairs)
    with on_the_interpreter():
        found = expert_linear(x, weight, pairs)
    rounding = 1e-5 if dtype == torch.float32 else 2.0**-7
    largest = float(expected.nan_to_num().abs().max())
    torch.testing.assert_close(found, expected, atol=largest * rounding, rtol=0, equal_nan=True)
    assert found.isnan().any(1).nonzero().flatten().tolist() == [14, 15]


def test_pairs_may_be_rows_of_their_own() -> None:
    weight, pairs = ExpertWeight(torch.randn(3 * 7, 20), 3), sorted_pairs(torch.tensor([[2, 0], [0, 1]]), 3)
    x = torch.randn(4, 20)
    with on_the_interpreter():
        found = expert_linear(x, weight, pairs)
    torch.testing.assert_close(found, reference.expert_linear(x, weight, pairs), atol=1e-5, rtol=1e-5)
