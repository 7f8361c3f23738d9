"""Schedulers hand the sampler what was said so far, and only where a request's sampling looks back."""

from dataclasses import replace

import pytest

from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.request import Computed, Drawn, FirstToken, Request, TokenLogprob
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.scheduler import Scheduler
from tests.fixtures.prefill import prefill_request, prefill_scheduler

BLOCK = 4
PROMPT = (11, 12, 13, 14, 15)
PLAIN = SamplingParams(max_tokens=5)
PENALISED = replace(PLAIN, repetition_penalty=1.2, n=2)
TOP = (TokenLogprob(4, -0.25), TokenLogprob(9, -1.5))


def decoding(params: SamplingParams) -> Scheduler:
    """Both choices have their token 0: 50 and 51."""
    scheduler = Scheduler(BlockPool(12), BLOCK, max_step_tokens=16, max_sequences=4)
    scheduler.reserve(Request(1, PROMPT, params, ()))
    scheduler.activate(1, [FirstToken(choice, 50 + choice, -0.5, end=None) for choice in range(params.n)])
    return scheduler


def test_prefill_gives_the_prompt_to_every_choice() -> None:
    scheduler = prefill_scheduler(BlockPool(4), BLOCK, chunk_tokens=3)
    scheduler.add(prefill_request(1, PROMPT, PENALISED))
    scheduler.commit(scheduler.plan(), [Computed()])
    [chunk] = scheduler.plan().chunks
    assert [(tuple(sample.history), sample.prompt_tokens) for sample in chunk.samples] == [(PROMPT, 5)] * 2
    assert chunk.samples[0].history is chunk.samples[1].history


def test_decode_gives_each_choice_its_answer() -> None:
    scheduler = decoding(PENALISED)
    for step in range(3):
        plan = scheduler.plan()
        for choice, chunk in enumerate(plan.chunks):
            [sample] = chunk.samples
            answer = [50 + choice, *(60 + 10 * made + choice for made in range(step))]
            assert (list(sample.history), sample.prompt_tokens) == ([*PROMPT, *answer], 5)
            assert len(sample.history) == chunk.end
        scheduler.commit(plan, [Computed((Drawn(60 + 10 * step + choice, -0.5),)) for choice in range(2)])


def test_request_without_penalties_has_no_history() -> None:
    prefill = prefill_scheduler(BlockPool(4), BLOCK, chunk_tokens=8)
    prefill.add(prefill_request(1, PROMPT, PLAIN))
    assert prefill.plan().chunks[0].samples[0].history == ()
    decode = decoding(PLAIN)
    for _ in range(2):
        plan = decode.plan()
        assert list(plan.chunks[0].samples[0].history) == []
        decode.commit(plan, [Computed((Drawn(7, -0.5),))])


def test_likeliest_tokens_are_passed_on() -> None:
    prefill = prefill_scheduler(BlockPool(4), BLOCK, chunk_tokens=8)
    prefill.add(prefill_request(1, PROMPT, PLAIN))
    [progress] = prefill.commit(prefill.plan(), [Computed((Drawn(7, -0.5, TOP),))])
    assert progress.first[0].top == TOP
    decode = decoding(PLAIN)
    [step] = decode.commit(decode.plan(), [Computed((Drawn(7, -0.5, TOP),))])
    assert step.drawn.top == TOP


@pytest.mark.parametrize(("prompt_logprobs", "cached_tokens"), [(None, 4), (0, 0), (3, 0)])
def test_prompt_with_requested_logprobs_is_computed_completely(prompt_logprobs, cached_tokens) -> None:
    scheduler = prefill_scheduler(BlockPool(8), BLOCK, chunk_tokens=8)
    for request_id, params in ((1, PLAIN), (2, replace(PLAIN, prompt_logprobs=prompt_logprobs))):
        scheduler.add(prefill_request(request_id, PROMPT, params, (b"first block",)))
        [progress] = scheduler.commit(scheduler.plan(), [Computed((Drawn(7, -0.5),))])
    assert progress.cached_tokens == cached_tokens
