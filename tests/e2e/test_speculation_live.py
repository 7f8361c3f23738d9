"""Workers with speculation: answers equal transformers and survive a killed worker, and drafts are counted.

Drafts come from prompt lookup, and from a small model.
"""

import asyncio
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from baton.client import AsyncAdminClient, AsyncBatonClient, Delta, RecentRequest
from tests.e2e.conftest import run
from tests.e2e.held import answers_held, make_answers_holdable
from tests.e2e.oracle import Oracle, ask_transformers, check_answers, make_asked
from tests.e2e.stack import Stack, make_stack
from tests.fixtures.draft_pair import DraftPair, make_draft_pair

TOGETHER, TOKENS, KILLED_AFTER = 12, 600, 60
HELD_TOKENS = 500  # after which an answer pauses until its worker is killed
COUNTED_S = 30.0
COUNTED = (
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "baton:spec_decode_gained_seconds_total",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_asked(tmp_path_factory.mktemp("drafting") / "llama", "llama")


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return ask_transformers(model, TOGETHER)


@pytest.fixture(scope="module")
def drafting(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    yield from run(make_drafting(tmp_path_factory.mktemp("stack"), model, "--speculate", "ngram"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> DraftPair:
    return make_draft_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def with_draft_model(pair: DraftPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    flags = ("--speculate", "draft", "--draft-model", str(pair.draft))
    yield from run(make_drafting(tmp_path_factory.mktemp("stack"), pair.model, *flags))


def make_drafting(folder: Path, model: Path, *flags: str) -> Stack:
    stack = make_stack(folder, model, decode=2, worker_flags=flags, elastic=True)
    stack.replace_module("baton.elastic_worker", "tests.fixtures.drafting_worker")
    make_answers_holdable(stack)
    return stack


def counted(stack: Stack) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{stack.http_port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {name: sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{")) for name in COUNTED}


async def stream_over_a_kill(stack: Stack, prompt: list[int], temperature: float) -> list[int]:
    """Stream an answer, and kill and restart its decode worker in the middle."""
    killed: list[str] = []
    with answers_held(stack, HELD_TOKENS) as held:

        async def kill() -> None:
            killed.append(await asyncio.to_thread(stack.kill_the_answering))
            held.let_go()
            stack.processes[killed[-1]].start()

        tokens = await stream(stack, prompt, temperature, kill)
    assert len(killed) == 1
    return tokens


async def stream(
    stack: Stack, prompt: list[int], temperature: float, disturb: Callable[[], Awaitable[None]] | None = None
) -> list[int]:
    """Stream an answer. `disturb`: awaited once, after some tokens."""
    tokens: list[int] = []
    async with AsyncBatonClient(stack.target, timeout_s=60) as baton:
        events = baton.generate(prompt, max_tokens=TOKENS, temperature=temperature, seed=3, ignore_eos=True)
        async for event in events:
            tokens += event.token_ids if isinstance(event, Delta) else ()
            if disturb is not None and len(tokens) >= KILLED_AFTER:
                await disturb()
                disturb = None
    return tokens


async def test_answers_equal_transformers(drafting: Stack, oracle: Oracle) -> None:
    await check_answers(drafting.target, oracle)


@pytest.mark.parametrize("temperature", [0.0, 0.3])
async def test_answer_resumes_after_a_killed_worker(drafting: Stack, temperature: float) -> None:
    prompt = [7, 8, 9] * 8
    whole = await stream(drafting, prompt, temperature)
    assert len(whole) == TOKENS
    assert await stream_over_a_kill(drafting, prompt, temperature) == whole
    await asyncio.to_thread(drafting.wait_ready)


async def test_drafted_and_accepted_tokens_are_counted(drafting: Stack) -> None:
    before = counted(drafting)
    await stream(drafting, [11, 12] * 20, temperature=0.0)  # the tiny model soon repeats itself, so drafts are accepted

    def grown() -> bool:
        after = counted(drafting)
        return all(after[name] > before[name] for name in COUNTED) and after[COUNTED[0]] >= after[COUNTED[1]]

    await asyncio.to_thread(drafting.wait_for, grown, COUNTED_S, "drafted tokens in the metrics")


async def test_model_drafted_answers_equal_transformers(with_draft_model: Stack, pair: DraftPair) -> None:
    await check_answers(with_draft_model.target, ask_transformers(pair.model, TOGETHER))


async def test_model_drafted_answer_resumes_after_a_killed_worker(with_draft_model: Stack) -> None:
    """The draft model of the other worker must first compute the KV of the answer so far."""
    before = counted(with_draft_model)
    whole = await stream(with_draft_model, [7, 8, 9] * 8, temperature=0.8)
    assert len(whole) == TOKENS

    def mostly_drawn() -> bool:
        drafted, accepted = (counted(with_draft_model)[name] - before[name] for name in COUNTED[:2])
        return accepted > 0.8 * drafted > 50

    await asyncio.to_thread(with_draft_model.wait_for, mostly_drawn, COUNTED_S, "drafts of the model in the metrics")
    assert await stream_over_a_kill(with_draft_model, [7, 8, 9] * 8, temperature=0.8) == whole
    await asyncio.to_thread(with_draft_model.wait_ready)


async def test_request_reports_its_drafts(drafting: Stack) -> None:
    async with AsyncAdminClient(f"127.0.0.1:{drafting.admin_port}") as admin, asyncio.timeout(60):
        begun = {each.request_id for each in await admin.recent_requests()}
        await stream(drafting, [13, 14] * 20, temperature=0.0)
        ended: list[RecentRequest] = []
        while not ended:
            ended = [each for each in await admin.recent_requests() if each.request_id not in begun]
            ended = [each for each in ended if each.phase == "answered"]
        [own] = ended
        why = await admin.why(own.request_id)
    assert own.drafts is not None and why.drafts == own.drafts
    assert 0 < own.drafts.accepted_tokens <= own.drafts.drafted_tokens
    assert own.drafts.accepted_tokens < own.generated_tokens
