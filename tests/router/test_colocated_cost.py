"""What a prompt is expected to cost on its decode worker: only from rates that were measured, with the error so far."""

from dataclasses import replace

import pytest

from baton.process.registry.worker_record import WorkerRole
from baton.router.placement.colocated import Basis, LocalPrefills, colocated_prefill
from baton.router.placement.rates import ATTENTION_TOKENS, RateLedger
from baton.router.types.placement import Measured, PlacementRequest, WorkerView

REQUEST = PlacementRequest(fingerprint=b"f", block_tokens=4, prompt_tokens=400, max_tokens=6, choices=1)
IDLE = WorkerView("d0", WorkerRole.DECODE, b"f", 1000, 8, 1000, 8)
BUSY = replace(IDLE, used_slots=2, elsewhere_slots=1, tokens_in_flight=100, pending_prompt_tokens=50, hit_blocks=25)


def test_idle_worker_is_expected_to_compute_at_the_rate_that_it_reported() -> None:
    ledger = RateLedger()
    ledger.reported_prefill("d0", 1000.0, None)
    found = colocated_prefill(REQUEST, replace(IDLE, rates=ledger.of("d0")))
    assert found is not None
    assert (found.basis, found.ttft_ms, found.wait_ms, found.answers) == (Basis.MEASURED, 400.0, 0.0, 0)


def test_colocated_cost_uses_the_reported_rate_beside_answers_with_waiting_prompts() -> None:
    ledger = RateLedger()
    ledger.reported_prefill("d0", 1000.0, 100.0)
    found = colocated_prefill(REQUEST, replace(BUSY, rates=ledger.of("d0")))
    assert found is not None
    assert (found.basis, found.wait_ms, found.compute_ms) == (
        Basis.MEASURED,
        500.0,
        3000.0 * (1 + 300 / ATTENTION_TOKENS),
    )
    assert (found.prompt_tokens, found.answers) == (300, 3)


@pytest.mark.parametrize("view", [IDLE, BUSY])
def test_rate_of_other_workers_is_an_assumption_and_no_rate_no_prediction(view: WorkerView) -> None:
    ledger = RateLedger()
    assert colocated_prefill(REQUEST, replace(view, rates=ledger.of("d0"))) is None
    ledger.computed("p0", 1000, 500.0)
    found = colocated_prefill(REQUEST, replace(view, rates=ledger.of("d0")))
    assert found is not None and found.basis is Basis.ASSUMED
    assert ledger.of("p0").prefill_measured is Measured.HERE


def test_rate_alone_is_assumed_beside_answers() -> None:
    ledger = RateLedger()
    ledger.reported_prefill("d0", 1000.0, None)
    found = colocated_prefill(REQUEST, replace(BUSY, rates=ledger.of("d0")))
    assert found is not None and found.basis is Basis.ASSUMED


def test_error_is_that_of_the_newest_prompts() -> None:
    prefills = LocalPrefills(kept=3)
    assert prefills.error(10) is None
    for predicted_ms, measured_ms in ((1.0, 1000.0), (100.0, 200.0), (100.0, 100.0), (120.0, 150.0), (0.0, 5.0)):
        prefills.take(10, predicted_ms, measured_ms)
    error = prefills.error(10)
    assert error is not None
    assert error == pytest.approx((3, 10, 0.2, 1.25))


def test_short_rest_says_nothing_of_a_long_prompt_where_there_was_one() -> None:
    prefills = LocalPrefills()
    for prompt_tokens, predicted_ms, measured_ms in ((1, 0.1, 10.0), (2, 0.2, 10.0), (500, 80.0, 100.0)):
        prefills.take(prompt_tokens, predicted_ms, measured_ms)
    assert prefills.error(200) == pytest.approx((1, 500, 0.2, 1.25))
    short = prefills.error(30)
    assert short is not None and (short.requests, short.median_tokens) == (3, 2), "none is like it"
