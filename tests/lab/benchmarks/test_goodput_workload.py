"""Requests of `baton bench goodput`: mixes of lengths and stretches of traces."""

import math
from itertools import pairwise

import pytest

from baton.lab.benchmarks.goodput.workload import LengthRange, MixPart, mix_workload, read_mix, trace_workload
from baton.lab.benchmarks.placement.traces import TraceArrival, block_ids

MIX = "0.75*96-256/64-160,0.25*512-768/16-48"


def test_mix_text_gives_shares_and_ranges() -> None:
    assert read_mix(MIX) == (
        MixPart(0.75, LengthRange(96, 256), LengthRange(64, 160)),
        MixPart(0.25, LengthRange(512, 768), LengthRange(16, 48)),
    )
    assert read_mix("300/20") == (MixPart(1.0, LengthRange(300, 300), LengthRange(20, 20)),)


@pytest.mark.parametrize("text", ["", "0.5*100", "0*1/1", "1*9-3/1", "1*0/1", "much*1/1", "1*1/1,"])
def test_malformed_mix_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"SHARE\*INPUT/OUTPUT|INPUT/OUTPUT"):
        read_mix(text)


def test_mix_draws_every_part_at_its_share_within_its_lengths() -> None:
    jobs = mix_workload(read_mix(MIX), vocab_size=500)(2.0, 2000, "0")
    long = [job for job in jobs if len(job.prompt) >= 512]
    short = [job for job in jobs if len(job.prompt) < 512]
    assert len(long) / len(jobs) == pytest.approx(0.25, abs=0.03)
    assert {job.output_tokens for job in long} == set(range(16, 49))
    assert {len(job.prompt) for job in short} <= set(range(96, 257))
    assert {job.output_tokens for job in short} <= set(range(64, 161))
    assert jobs[-1].arrival_s == pytest.approx(1000.0)


def test_equal_seeds_draw_equal_requests_and_others_do_not() -> None:
    workload = mix_workload(read_mix(MIX), vocab_size=500)
    assert workload(1.0, 20, "a") == workload(1.0, 20, "a")
    assert workload(1.0, 20, "a") != workload(1.0, 20, "b")


def test_infinite_rate_sends_everything_immediately() -> None:
    trace = [TraceArrival(float(each), 10, 5, ()) for each in range(8)]
    for workload in (mix_workload(read_mix(MIX), 500), trace_workload(trace, 500, 100, 100)):
        assert {job.arrival_s for job in workload(math.inf, 8, "0")} == {0.0}


def test_trace_keeps_order_and_relative_gaps_at_the_asked_rate() -> None:
    trace = [TraceArrival(at_s, 10, 5, ()) for at_s in (0.0, 30.0, 40.0, 100.0)]
    arrivals_s = [job.arrival_s for job in trace_workload(trace, 500, 100, 100)(2.0, 4, "0")]
    assert arrivals_s == pytest.approx([0.0, 0.6, 0.8, 2.0])
    assert all(earlier <= later for earlier, later in pairwise(arrivals_s))


def test_trace_prompts_share_tokens_exactly_where_blocks_are_equal() -> None:
    trace = [TraceArrival(0.0, 1000, 900, block_ids((1, 2))), TraceArrival(1.0, 1024, 5, block_ids((1, 3)))]
    first, second = trace_workload(trace, 500, max_prompt=2000, max_answer=100)(1.0, 2, "0")
    assert (len(first.prompt), first.output_tokens) == (1000, 100)
    assert first.prompt[:512] == second.prompt[:512]
    assert first.prompt[512:] != second.prompt[512:1000]


def test_trace_prompts_are_cut_to_the_longest_prompt() -> None:
    trace = [TraceArrival(0.0, 5000, 1, block_ids(range(10)))]
    (job,) = trace_workload(trace, 500, max_prompt=700, max_answer=1)(1.0, 1, "0")
    assert len(job.prompt) == 700
