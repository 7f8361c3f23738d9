"""The router places prompts by what is in the disk tier, with workers that share a directory or do not."""

import asyncio
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.client import AdminClient, AsyncBatonClient, Completion, TierView
from tests.e2e.conftest import run
from tests.e2e.stack import Stack, make_stack

BLOCK = 32
BLOCKS = 40
PROMPT = BLOCKS * BLOCK + 5
WITHIN_S = 20.0


def with_files(stack: Stack, worker: str, directory: Path) -> None:
    flags = ["--kv-tier-dir", str(directory), "--kv-tier-size", "64MiB", "--kv-tier-load", "always"]
    stack.processes[worker].command += flags


@pytest.fixture
def two_directories(tiny_llama: Path, tmp_path: Path) -> Iterator[Stack]:
    """1P+1D, each with its own directory, as on two machines."""
    router_flags = ["--no-prefill-worker", "queue", "--local-prefill-tokens", "0"]
    stack = make_stack(tmp_path / "stack", tiny_llama, router_flags=router_flags)
    stack.processes["prefill-0"].command += ["--fetch", "always", "--fetch-timeout-s", "30"]
    for worker in ("prefill-0", "decode-0"):
        with_files(stack, worker, tmp_path / worker)
    yield from run(stack)


@pytest.fixture
def one_directory(tiny_llama: Path, tmp_path: Path) -> Iterator[Stack]:
    """2P+1D; only the second prefill worker and the decode worker have a disk tier, in the same directory."""
    stack = make_stack(tmp_path / "stack", tiny_llama, prefill=2, router_flags=["--local-prefill-tokens", "0"])
    for worker in ("prefill-1", "decode-0"):
        with_files(stack, worker, tmp_path / "kv")
    yield from run(stack)


def prompt(seed: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(3, 500) for _ in range(PROMPT)]


async def ask(stack: Stack, token_ids: list[int]) -> Completion:
    async with AsyncBatonClient(stack.target, timeout_s=60) as baton:
        return await baton.complete(token_ids, max_tokens=20, temperature=0.0, ignore_eos=True)


def views(stack: Stack) -> dict[str, TierView]:
    """Return what the router knows of files, by worker."""
    workers = stack.status().workers
    return {each.worker_id: each.tier_view for each in workers if each.tier_view is not None and each.tier_view.follows}


async def until_known(stack: Stack, worker: str, blocks: int) -> TierView:
    """Wait until the router knows of that many blocks in the worker's directory."""

    def known() -> bool:
        return worker in views(stack) and views(stack)[worker].directory_blocks >= blocks

    await asyncio.to_thread(stack.wait_for, known, WITHIN_S, f"{blocks} blocks in files known of {worker}")
    return views(stack)[worker]


def restart(stack: Stack, *workers: str) -> None:
    for worker in workers:
        stack.processes[worker].kill()
    stack.start(workers)
    stack.wait_ready()


def fetches(stack: Stack) -> list[dict[str, Any]]:
    """Return the attributes of all fetches in the trace."""
    return [span["attributes"] for span in stack.spans() if span["name"] == "prefill.fetch"]


async def test_blocks_only_in_the_decode_workers_directory_are_fetched_through_it(
    two_directories: Stack, tmp_path: Path
) -> None:
    stack, token_ids = two_directories, prompt(seed=1)
    first = await ask(stack, token_ids)
    mine = await until_known(stack, "decode-0", BLOCKS)
    other = await until_known(stack, "prefill-0", BLOCKS)
    assert mine.directory_id != other.directory_id

    def lose_all_but_the_decode_workers_files() -> None:
        stack.processes["prefill-0"].kill()
        shutil.rmtree(tmp_path / "prefill-0")
        stack.processes["decode-0"].kill()
        stack.start(["prefill-0", "decode-0"])
        stack.wait_ready()

    await asyncio.to_thread(lose_all_but_the_decode_workers_files)
    await until_known(stack, "decode-0", BLOCKS)
    others = (await until_known(stack, "prefill-0", 0)).directory_blocks
    assert others < BLOCKS, "at most what the readiness probe has left there"
    again = await ask(stack, token_ids)
    assert again.choices[0].token_ids == first.choices[0].token_ids
    assert again.usage.cached_tokens == BLOCKS * BLOCK
    await asyncio.to_thread(
        stack.wait_for, lambda: any(each["baton.fetch.tokens"] for each in fetches(stack)), WITHIN_S, "a fetch"
    )
    with AdminClient(f"127.0.0.1:{stack.admin_port}") as admin:
        [attempt] = admin.explain(again.request_id).attempts
    assert attempt.predicted["fetch_loaded_tokens"] == BLOCKS * BLOCK
    assert "from its files" in attempt.reason


async def test_prompt_is_placed_where_it_can_be_loaded_and_explained_so(one_directory: Stack) -> None:
    stack, token_ids = one_directory, prompt(seed=2)
    first = await ask(stack, token_ids)
    await until_known(stack, "decode-0", BLOCKS)
    await asyncio.to_thread(restart, stack, "prefill-0", "prefill-1", "decode-0")
    await until_known(stack, "prefill-1", BLOCKS)
    again = await ask(stack, token_ids)
    assert again.choices[0].token_ids == first.choices[0].token_ids
    assert again.usage.cached_tokens == BLOCKS * BLOCK
    with AdminClient(f"127.0.0.1:{stack.admin_port}") as admin:
        [attempt] = admin.explain(again.request_id).attempts
    [chosen] = [each for each in attempt.candidates if each.chosen and each.role == "prefill"]
    assert chosen.worker_id == "prefill-1"
    assert "load_ms" in chosen.cost_terms and chosen.terms["load_ms"] > 0.0
    assert attempt.predicted["loaded_tokens"] == attempt.actual["loaded_tokens"] == BLOCKS * BLOCK


async def test_files_of_a_dead_worker_stay_known_through_its_directory(one_directory: Stack) -> None:
    stack = one_directory
    await ask(stack, prompt(seed=3))
    await until_known(stack, "decode-0", BLOCKS)
    await until_known(stack, "prefill-1", BLOCKS)
    before = views(stack)
    assert before["decode-0"].directory_id == before["prefill-1"].directory_id
    stack.processes["decode-0"].kill()
    await asyncio.to_thread(stack.wait_for, lambda: "decode-0" not in connected(stack), WITHIN_S, "loss")
    assert views(stack)["prefill-1"].directory_blocks >= before["prefill-1"].directory_blocks
    stack.start(["decode-0"])
    await asyncio.to_thread(stack.wait_ready)


def connected(stack: Stack) -> set[str]:
    return {worker.worker_id for worker in stack.status().workers if worker.connected}
