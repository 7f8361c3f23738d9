"""The runner carries out plans: copies, shared prefixes, poisoned neighbours."""

from pathlib import Path
from typing import cast

import pytest
import torch

from baton.engine.request import BlockCopy, Chunk, Computed, NonFinite, Plan, Sample
from baton.engine.runner.runner import Runner
from baton.engine.sampling.params import SamplingParams
from baton.kernels.types import KvPages
from tests.fixtures.paged import PagedModel, drawn, random_prompt

GREEDY = (Sample(0, SamplingParams(max_tokens=8)),)


@pytest.fixture
def paged(checkpoint: Path) -> PagedModel:
    return PagedModel(checkpoint)


def test_results_are_parallel_to_chunks_of_any_mix(paged: PagedModel) -> None:
    long, short = random_prompt(40), random_prompt(1)
    chunks = (
        Chunk(1, long, 0, paged.blocks(40), GREEDY),
        Chunk(2, short, 0, paged.blocks(1), GREEDY),
        Chunk(3, random_prompt(20), 0, paged.blocks(20)),
        Chunk(4, long, 0, paged.blocks(40), GREEDY * 2),
    )
    first, second, third, fourth = paged.runner.run(Plan(chunks))
    assert third == Computed()
    assert [token.token_id for token in drawn(fourth)] == [token.token_id for token in drawn(first) * 2]
    [alone] = paged.runner.run(Plan((Chunk(5, short, 0, paged.blocks(1), GREEDY),)))
    assert drawn(alone)[0].token_id == drawn(second)[0].token_id


def test_sampled_tokens_do_not_depend_on_the_batch(paged: PagedModel) -> None:
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=99)
    samples = tuple(Sample(choice, params) for choice in range(6))
    prompt = random_prompt(50)
    mine = Chunk(1, prompt, 0, paged.blocks(50), samples)
    [alone] = paged.runner.run(Plan((mine,)))
    crowd = tuple(Chunk(index, random_prompt(index), 0, paged.blocks(index), GREEDY) for index in range(2, 12))
    among = paged.runner.run(Plan((*crowd, mine._replace(block_table=paged.blocks(50)))))[-1]
    assert [token.token_id for token in drawn(alone)] == [token.token_id for token in drawn(among)]


def test_sampled_tokens_do_not_depend_on_how_the_prompt_was_cut(paged: PagedModel) -> None:
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=99)
    samples = tuple(Sample(choice, params) for choice in range(6))
    prompt = random_prompt(50)
    [whole] = paged.runner.run(Plan((Chunk(1, prompt, 0, paged.blocks(50), samples),)))
    table = paged.blocks(50)
    paged.runner.run(Plan((Chunk(2, prompt[:41], 0, table),)))
    [cut] = paged.runner.run(Plan((Chunk(2, prompt[41:], 41, table, samples),)))
    assert [token.token_id for token in drawn(whole)] == [token.token_id for token in drawn(cut)]


def test_copies_are_done_before_anything_is_computed(paged: PagedModel) -> None:
    prompt = random_prompt(20)
    [shared] = paged.blocks(20)
    [copied] = paged.blocks(20)
    paged.runner.run(Plan((Chunk(1, prompt, 0, [shared]),)))
    before = paged.kv.data[shared].clone()
    step = Chunk(1, [7], 20, [copied], GREEDY)
    [result] = paged.runner.run(Plan((step,), (BlockCopy(shared, copied),)))
    [expected] = paged.runner.run(Plan((Chunk(2, [*prompt, 7], 0, paged.blocks(21), GREEDY),)))
    assert drawn(result)[0].token_id == drawn(expected)[0].token_id
    torch.testing.assert_close(paged.kv.data[shared], before, equal_nan=True, rtol=0, atol=0)


def test_a_plan_of_copies_alone_runs(paged: PagedModel) -> None:
    source, destination = paged.blocks(64)
    paged.kv.data[source] = 3.0
    assert paged.runner.run(Plan((), (BlockCopy(source, destination),))) == ()
    assert bool((paged.kv.data[destination] == 3.0).all())


def test_a_prefix_computed_by_another_request_is_read(paged: PagedModel) -> None:
    prompt = random_prompt(70)
    table = paged.blocks(70)
    [expected] = paged.runner.run(Plan((Chunk(1, prompt, 0, table, GREEDY),)))
    [result] = paged.runner.run(Plan((Chunk(2, prompt[64:], 64, [*table[:2], *paged.blocks(6)], GREEDY),)))
    assert drawn(result)[0].token_id == drawn(expected)[0].token_id


@pytest.mark.parametrize("width", [1, 3])
def test_a_poisoned_sequence_fails_alone_and_changes_no_bit_of_its_neighbours(paged: PagedModel, width: int) -> None:
    tables = [paged.blocks(43) for _ in range(3)]
    prompts = [random_prompt(43, seed=seed) for seed in range(3)]
    for prompt, table in zip(prompts, tables, strict=True):
        paged.runner.run(Plan((Chunk(0, prompt[:-width], 0, table),)))
    plan = Plan(
        tuple(
            Chunk(index, prompt[-width:], 43 - width, table, GREEDY)
            for index, (prompt, table) in enumerate(zip(prompts, tables, strict=True))
        )
    )
    clean = paged.runner.run(plan)
    paged.kv.data[tables[1][0], 2] = float("nan")
    assert paged.runner.run(plan) == (clean[0], NonFinite(), clean[2])


def test_a_chunk_that_draws_nothing_still_reports_what_is_not_finite(paged: PagedModel) -> None:
    table = paged.blocks(40)
    paged.runner.run(Plan((Chunk(1, random_prompt(30), 0, table),)))
    paged.kv.data[table[0], 0, 1] = float("inf")
    assert paged.runner.run(Plan((Chunk(1, random_prompt(5), 30, table),))) == (NonFinite(),)


def test_warm_up_touches_only_block_zero(paged: PagedModel) -> None:
    paged.runner.warm_up()
    assert bool(paged.kv.data[1:].isnan().all())


@pytest.mark.parametrize("chunk", [Chunk(1, [], 0, [0]), Chunk(1, [5, 6], 31, [0])])
def test_a_chunk_without_tokens_or_blocks_is_refused(paged: PagedModel, chunk: Chunk) -> None:
    with pytest.raises(ValueError, match="request 1"):
        paged.runner.run(Plan((chunk,)))


def test_a_pool_of_another_shape_is_refused(paged: PagedModel) -> None:
    with pytest.raises(ValueError, match="model needs"):
        Runner(paged.model, paged.layout, KvPages(paged.kv.data[:, :3]))


@pytest.mark.parametrize("odd", [-1, 10**6, 1 << 70, "x", None])
def test_runner_fails_alone_the_chunk_whose_tokens_cannot_be_computed(paged: PagedModel, odd: object) -> None:
    first, second = (Chunk(n, random_prompt(20 * n), 0, paged.blocks(20 * n), GREEDY) for n in (1, 2))
    alone = paged.runner.run(Plan((first, second)))
    bad = Chunk(3, cast(list[int], [5, odd, 7]), 0, paged.blocks(3), GREEDY)
    before, failed, after = paged.runner.run(Plan((first, bad, second)))
    assert (before, after) == alone
    assert isinstance(failed, NonFinite)
    assert failed.cause.startswith("its tokens cannot be computed: ")
    assert paged.runner.run(Plan((bad,))) == (failed,)
    with pytest.raises((TypeError, ValueError, OverflowError)):
        paged.runner.run(Plan((bad, bad._replace(request_id=4))))  # no chunk can be computed: it is no request's fault
