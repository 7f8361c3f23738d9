"""Times that clients of a simulated cluster see; in virtual time they are exact."""

import random
from collections.abc import Sequence

import pytest

from baton.lab.sizing.cluster import CallResult, ClusterShape, SizingCall, run_cluster
from baton.lab.sizing.costs import BY_BATCH, BY_CONTEXT, BY_PROMPT, Overheads, read_costs
from baton.lab.sizing.trials import SizingTargets, Trial, TrialFailed, TrialFigures, crew, figures_of

STEP_S, TOKEN_MS = 0.02, 1.0
STEP_MS = 1e3 * STEP_S
POINTS = {
    BY_BATCH: {1: STEP_MS, 64: STEP_MS},
    BY_CONTEXT: {64: STEP_MS, 2048: STEP_MS},
    BY_PROMPT: {64: 64 * TOKEN_MS, 2048: 2048 * TOKEN_MS},
}
CURVES = {
    "batch_context_tokens": 512,
    "curves": [
        {"name": name, "points": [{"x": x, "measured_ms": ms} for x, ms in points.items()]}
        for name, points in POINTS.items()
    ],
}
COSTS, OVERHEADS = read_costs(CURVES), Overheads(message_s=5e-4, step_s=0.0, copy_s=0.0)
PAIR = ClusterShape(1, 1, kv_tokens=20_000, context_tokens=2048, max_sequences=8)


def calls(at_s: Sequence[float], prompt_tokens: int = 400, answer_tokens: int = 8) -> list[SizingCall]:
    chance = random.Random(3)
    return [SizingCall(each, chance.randbytes(prompt_tokens), answer_tokens) for each in at_s]


def run(cluster: ClusterShape, asked: Sequence[SizingCall], seed: int = 0) -> list[CallResult]:
    return run_cluster(cluster, COSTS, OVERHEADS, asked, seed)


def test_lone_call_takes_its_steps_and_a_few_messages() -> None:
    [answered] = run(PAIR, calls([0.0]))
    assert (answered.error, answered.tokens) == ("", 8)
    assert 0.4 < answered.ttft_s < 0.4 + 0.03
    assert answered.gaps_s[1:] == [pytest.approx(STEP_S, abs=1e-3)] * 6
    assert STEP_S < answered.gaps_s[0] < STEP_S + 0.02, "the hand-over lies in the first gap"


def test_prompt_waits_for_the_one_before_it_and_with_two_prefill_workers_it_does_not() -> None:
    asked = calls([0.0, 0.01])
    one, two = (run(ClusterShape(prefill, 1, 20_000, 2048), asked)[1].ttft_s for prefill in (1, 2))
    assert one == pytest.approx(0.8, abs=0.05)
    assert two == pytest.approx(0.4, abs=0.05)


def test_answers_beyond_the_places_of_a_decode_worker_wait_for_one() -> None:
    asked = calls([0.0] * 4, prompt_tokens=40, answer_tokens=50)
    few, enough = (run(ClusterShape(1, 1, 20_000, 2048, max_sequences=slots), asked) for slots in (2, 4))
    assert max(each.ttft_s for each in few) > 0.9
    assert max(each.ttft_s for each in enough) < 0.5


def test_shared_prefix_is_computed_once() -> None:
    [first] = calls([0.0], prompt_tokens=800)
    again = SizingCall(3.0, first.prompt[:768] + bytes(32), 8)
    answered = run(PAIR, [first, again])
    assert answered[0].ttft_s == pytest.approx(0.8, abs=0.05)
    assert answered[1].ttft_s < 0.2


def test_processes_of_their_own_give_the_same_figures_each_time_and_name_what_failed() -> None:
    targets = SizingTargets(ttft_ms=500.0, tbt_ms=50.0)
    done: list[None] = []
    trial = Trial(PAIR, CURVES, OVERHEADS, tuple(calls([0.0, 0.01], prompt_tokens=300)), targets, seed=1)
    broken = Trial(PAIR, {}, OVERHEADS, trial.calls, targets, seed=1)
    with crew(1, lambda: done.append(None)) as simulations:
        first, second = simulations.run([trial, trial])
        assert first == second
        assert (first.calls, first.share, first.tbt_share, len(done)) == (2, 0.5, 1.0, 4)
        with pytest.raises(TrialFailed, match=r"simulation of 1P\+1D ended early: .*no curve is named"):
            simulations.run([broken])


def test_call_that_failed_is_in_no_slo() -> None:
    answered = [CallResult(0.0, [0.1, 0.2], 2, ""), CallResult(0.0, [], 0, "RESOURCE_EXHAUSTED")]
    figures = figures_of(answered, SizingTargets(1000.0, 1000.0))
    assert figures == TrialFigures(2, 1, 100.0, 100.0, 100.0, 100.0, 0.5, 0.5, 0.5)
