"""However requests are scheduled, each answer is the one that it has alone, to the last bit of its log-probabilities.

Random schedules of a real model on the CPU: steps of any size, any number beside each other, pools so short that
answers give up their blocks and are computed again, prefixes found, threads, with and without drafts.
"""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.request import Request
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.speculation import Speculation
from baton.text.block_hash import HashChain, root_hash
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import Answers, PagedModel, answered, random_prompt

BLOCK, BLOCKS, MOST_TOKENS = 8, 512, 1024
LEAST_BLOCKS = 96  # that the three choices of the longest prompt fit in
ROOT = root_hash(b"model", "any")
GREEDY = SamplingParams(max_tokens=24, logprobs=2)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.9, seed=11, logprobs=1)
KINDS = [
    GREEDY,
    SAMPLED,
    replace(SAMPLED, n=3),
    replace(SAMPLED, top_k=30, top_p=0.9, repetition_penalty=1.2),
    replace(GREEDY, frequency_penalty=0.6, presence_penalty=0.3),
]
SCHEDULES = 4


def requests() -> list[Request]:
    """Every second prompt begins as the one before it."""
    draw = random.Random(5)
    made: list[Request] = []
    for number in range(12):
        own = random_prompt(draw.randint(1, 180), seed=number)
        tokens = tuple([*made[-1].token_ids[:64], *own] if number % 2 else own)
        hashes = tuple(HashChain(ROOT, BLOCK).first(len(tokens) // BLOCK, list(tokens)))
        made.append(Request(number, tokens, KINDS[number % len(KINDS)], hashes))
    return made


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def paged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PagedModel:
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("schedules"), "qwen3")
    return PagedModel(checkpoint, BLOCK, BLOCKS, getattr(torch, request.param), packed=True)


@pytest.fixture(scope="module")
def alone(paged: PagedModel) -> Answers:
    """Each prompt in one step."""
    answers = Answers()
    for request in requests():
        answers |= on_fresh_pool(paged, Scheduler(BlockPool(BLOCKS), BLOCK, MOST_TOKENS, 4), [request])
    return answers


def on_fresh_pool(paged: PagedModel, scheduler: Scheduler, wanted: list[Request], root: bytes | None = None) -> Answers:
    paged.kv.data.fill_(float("nan"))
    return answered(paged.runner, scheduler, wanted, root)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("seed", range(SCHEDULES))
def test_an_answer_is_the_same_under_any_schedule(paged: PagedModel, alone: Answers, seed: int) -> None:
    draw = random.Random(seed)
    torch.set_num_threads(draw.choice([1, 2]))
    wanted = requests()
    draw.shuffle(wanted)
    scheduler = Scheduler(
        BlockPool(LEAST_BLOCKS if seed % 2 else BLOCKS),
        BLOCK,
        draw.choice([16, 33, 64, 100, 512]),
        max_sequences=draw.choice([4, 6, 16]),
        speculation=draw.choice([None, Speculation(5)]),
    )
    assert on_fresh_pool(paged, scheduler, wanted, ROOT if draw.random() < 0.5 else None) == alone


def test_a_short_pool_makes_answers_give_up_their_blocks(paged: PagedModel) -> None:
    """Else the schedules above would show less than they seem to."""
    scheduler = Scheduler(BlockPool(LEAST_BLOCKS), BLOCK, 100, max_sequences=16)
    on_fresh_pool(paged, scheduler, requests())
    assert scheduler.counters.preemptions > 0
