"""Answers that had to give up their blocks equal those that never had, token for token, on a real model in float32.

Both ways: KV back from host memory, and computed again; computed here and landed; drawn with seeds and penalties.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from baton.engine.kv_cache.block_table import BlockTable
from baton.engine.kv_cache.swap_space import SwapSpace
from baton.engine.request import Chunk, Plan, Request
from baton.engine.runner.runner import HostPool, Runner
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequences import SchedulerCounters, first_tokens
from baton.text.block_hash import root_hash
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import PagedModel, answered, drawn, random_prompt, token_ids
from tests.fixtures.prefill import first_samples

BLOCK = 8
ROOMY, TIGHT = 64, 14  # blocks: the four below need up to 7, 7, 7 and 13
SAMPLED = SamplingParams(max_tokens=24, temperature=1.0, seed=7)
REQUESTS = [
    Request(0, tuple(random_prompt(30)), SamplingParams(max_tokens=24), ()),
    Request(1, tuple(random_prompt(27)), replace(SAMPLED, repetition_penalty=1.3, frequency_penalty=0.5), ()),
    Request(2, tuple(random_prompt(30)), replace(SAMPLED, top_p=0.9, presence_penalty=0.7), ()),
    Request(3, tuple(random_prompt(21)), replace(SAMPLED, n=3), ()),
]
Answers = dict[tuple[int, int], list[int]]


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the second some layers have a window of 32 tokens, whose blocks are apart."""
    return make_checkpoint(tmp_path_factory.mktemp("preemption"), request.param)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Answers:
    answers, counters = answer(checkpoint, blocks=ROOMY, host_slots=0)
    assert counters.preemptions == 0
    return answers


def answer(
    checkpoint: Path, blocks: int, host_slots: int, lands: Sequence[int] = (), cached: bool = False
) -> tuple[Answers, SchedulerCounters]:
    """All requests at once; those in `lands` come with KV computed elsewhere."""
    paged = PagedModel(checkpoint, BLOCK, blocks)
    elsewhere = PagedModel(checkpoint, BLOCK, ROOMY)
    groups = paged.layout.groups
    storage = paged.kv.data.flatten().view(torch.uint8).view(groups.blocks(blocks), paged.layout.block_bytes)
    assert storage.data_ptr() == paged.kv.data.data_ptr(), "the pool itself, no copy of it"
    host_slots = groups.blocks(host_slots)
    runner = Runner(paged.model, paged.layout, paged.kv, HostPool(storage, host_slots))
    scheduler = Scheduler(paged.pool(blocks), BLOCK, 16, max_sequences=8, swap=SwapSpace(host_slots))
    root = root_hash(b"model", "float32") if cached else None
    answers: Answers = {}
    for request in REQUESTS:
        if request.request_id not in lands:
            scheduler.add(request, root)
            continue
        reservation = scheduler.reserve(request, root)
        assert reservation is not None
        table = elsewhere.blocks(len(request.token_ids))
        chunk = Chunk(request.request_id, request.token_ids, 0, table, first_samples(request))
        [result] = elsewhere.runner.run(Plan((chunk,)))
        first = first_tokens(chunk, drawn(result))
        columns, first_live = len(table) // groups.count, groups.first_live(len(request.token_ids))
        read = BlockTable(elsewhere.pool(0), table).held(0, columns, first_live)
        paged.kv.data[list(reservation.blocks)] = elsewhere.kv.data[list(read)]
        scheduler.activate(request.request_id, first)
        answers |= {(request.request_id, token.choice): [token.token_id] for token in first}
    for key, made in token_ids(answered(runner, scheduler, ())).items():
        answers.setdefault(key, []).extend(made)
    assert not scheduler.has_work
    return answers, scheduler.counters


@pytest.mark.parametrize(
    ("host_slots", "lands", "cached"),
    [*product((0, 64), ((), (0, 1)), (False, True)), (4, (), False)],
)
def test_preempted_answers_equal_those_of_a_roomy_pool(
    checkpoint: Path, expected: Answers, host_slots: int, lands: tuple[int, ...], cached: bool
) -> None:
    answers, counters = answer(checkpoint, TIGHT, host_slots, lands, cached)
    assert counters.preemptions > 0
    assert answers == expected
