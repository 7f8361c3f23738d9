"""`baton why` on a stack with small pools: blocks that were evicted, have another salt or are on another worker."""

import asyncio
import random
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.cli.why.tables import WIDTH, lines
from baton.client import AdminClient, AsyncBatonClient, ModelNotFound, RequestWhy
from tests.e2e.conftest import run
from tests.e2e.stack import Stack, make_stack

BLOCK_TOKENS = 16
PROMPT_BLOCKS = 12
LOCAL_TOKENS = 4
QUESTION = [7, 8, 9, 10, 11, 12]  # longer than the decode worker would compute itself after a cached prompt
RECORDED_S = 30.0
ADDS_UP_MS = 2.0
MOST_REQUESTS = 50  # on a busy machine, processes wait for a core between two stages


@pytest.fixture(scope="module")
def small(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """2P+1D; prefill workers take turns, and each pool holds a few prompts."""
    flags = ["--kv-memory", "1MiB", "--block-size", str(BLOCK_TOKENS)]
    router = ["--placement", "round_robin", "--local-prefill-tokens", str(LOCAL_TOKENS)]
    folder = tmp_path_factory.mktemp("why")
    yield from run(
        make_stack(folder, tiny_llama, prefill=2, decode=1, with_redis=False, worker_flags=flags, router_flags=router)
    )


@pytest.fixture
async def baton(small: Stack) -> AsyncIterator[AsyncBatonClient]:
    async with AsyncBatonClient(small.target, timeout_s=60) as client:
        yield client


def new_prompt(seed: int) -> list[int]:
    """Make a prompt with one token more than full blocks, so that all its blocks can be cached."""
    draw = random.Random(seed)
    return [draw.randrange(3, 500) for _ in range(PROMPT_BLOCKS * BLOCK_TOKENS + 1)]


async def ask(stack: Stack, baton: AsyncBatonClient, prompt: list[int], tokens: int = 2, **options: Any) -> RequestWhy:
    """Send a request; return what the router recorded of it once its view of the caches is up to date."""
    name = f"why-{uuid.uuid4().hex}"
    await baton.complete(prompt, max_tokens=tokens, ignore_eos=True, request_id=name, **options)
    found: list[RequestWhy] = []

    def recorded() -> bool:
        with AdminClient(f"127.0.0.1:{stack.admin_port}", timeout_s=20.0) as admin:
            try:
                found.append(admin.why(name))
            except ModelNotFound:
                return False
        views = [worker.cache_view for worker in stack.status().workers]
        return all(view is not None and view.exact for view in views)

    await asyncio.to_thread(stack.wait_for, recorded, RECORDED_S, f"record of {name} and exact views")
    return found[-1]


def fates(found: RequestWhy) -> dict[str, int]:
    """Return the numbers of blocks by their fate, in the order of the prompt."""
    assert found.cache is not None
    places = [place for each in found.cache.runs for place in range(each.first_block, each.first_block + each.blocks)]
    assert places == list(range(PROMPT_BLOCKS))
    return {
        fate: sum(each.blocks for each in found.cache.runs if each.fate == fate)
        for fate in {each.fate for each in found.cache.runs}
    }


def adds_up(found: RequestWhy) -> bool:
    stages = found.stages
    parts = (stages.router_queue_ms, stages.route_ms, stages.prefill_fetch_ms, stages.prefill_queue_ms)
    added_ms = sum(parts) + stages.prefill_ms + stages.return_ms
    return stages.ttft_ms > 0 and abs(added_ms - stages.ttft_ms) <= max(ADDS_UP_MS, 0.03 * stages.ttft_ms)


async def test_new_prompt_was_never_there_and_the_time_to_its_first_token_adds_up(
    small: Stack, baton: AsyncBatonClient
) -> None:
    for number in range(MOST_REQUESTS):
        found = await ask(small, baton, new_prompt(1000 + number), tokens=20)
        assert fates(found) == {"never": PROMPT_BLOCKS}
        if adds_up(found):
            break
    assert adds_up(found), found
    assert found.longest_gap_ms > 0
    text = list(lines(found))
    assert max(map(len, text)) <= WIDTH and any(line.startswith("The first token came after") for line in text)


async def test_blocks_of_another_worker_are_fetched_or_named(small: Stack, baton: AsyncBatonClient) -> None:
    prompt = new_prompt(2)
    first, second = [await ask(small, baton, asked) for asked in (prompt, prompt + QUESTION)]
    assert first.cache is not None and second.cache is not None
    assert first.cache.worker_id != second.cache.worker_id, "prefill workers take turns"
    found = fates(second)
    assert found.keys() <= {"fetched", "elsewhere"} and sum(found.values()) == PROMPT_BLOCKS
    others = {each.worker_id for each in second.cache.runs}
    assert others and second.cache.worker_id not in others and all(others)


async def test_same_tokens_under_another_salt_are_found(small: Stack, baton: AsyncBatonClient) -> None:
    prompt = new_prompt(3)
    salts = ("", "mine", "yours")
    plain, salted, again = [await ask(small, baton, prompt, cache_salt=salt) for salt in salts]
    assert fates(plain) == {"never": PROMPT_BLOCKS}
    assert fates(salted) == fates(again) == {"other_salt": PROMPT_BLOCKS}


async def test_prompt_with_requested_logprobs_uses_no_cache(small: Stack, baton: AsyncBatonClient) -> None:
    prompt = new_prompt(6)
    await ask(small, baton, prompt)
    assert fates(await ask(small, baton, prompt, prompt_logprobs=1)) == {"unused": PROMPT_BLOCKS}


async def test_evicted_block_is_said_to_be_evicted_and_when(small: Stack, baton: AsyncBatonClient) -> None:
    prompt = new_prompt(4)
    for asked in (prompt, prompt + QUESTION):  # on both prefill workers
        await ask(small, baton, asked)
    pool = max(worker.load.pages.total for worker in small.status().workers if worker.load is not None)
    for seed in range(2 * (pool // PROMPT_BLOCKS + 2)):  # two tokens, so that the decode worker has each prompt too
        await baton.complete(new_prompt(100 + seed), max_tokens=2, ignore_eos=True)
    found = await ask(small, baton, prompt)
    assert fates(found) == {"evicted": PROMPT_BLOCKS}
    assert found.cache is not None
    assert all(0.0 <= each.least_age_s <= each.most_age_s <= found.cache.known_s for each in found.cache.runs)


async def test_prompt_computed_by_decode_measures_its_prediction_error(small: Stack, baton: AsyncBatonClient) -> None:
    prompt = new_prompt(5)
    over_prefill = (await ask(small, baton, prompt)).colocated
    assert over_prefill is not None and not over_prefill.is_local and over_prefill.worker_id == "decode-0"
    assert over_prefill.basis in ("measured", "assumed")
    assert over_prefill.ttft_ms > 0 and over_prefill.prompt_tokens == len(prompt) and over_prefill.measured_ttft_ms > 0
    local = (await ask(small, baton, prompt)).colocated
    assert local is not None and local.is_local and local.prompt_tokens == 1
    assert local.checked_requests == over_prefill.checked_requests + 1
    assert local.median_error > 0 and local.median_ratio > 0
