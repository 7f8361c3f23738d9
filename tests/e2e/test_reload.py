"""Weights are reloaded on a running stack with two routers, one worker with two ranks, also when a worker dies."""

import asyncio
import json
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.client import AsyncBatonClient, BatonClientError
from tests.e2e.conftest import run
from tests.e2e.held import answers_held, make_answers_holdable
from tests.e2e.stack import Stack, make_stack
from tests.fixtures.adapters import greedy, merged_model
from tests.fixtures.paged import random_prompt
from tests.fixtures.perturbed import perturbed
from tests.fixtures.waiting import eventually

TOKENS, LONG, WITHIN_S = 16, 120, 60.0
HELD_TOKENS = 60  # after which an answer pauses while weights are loaded
PROMPT = random_prompt(70)


@pytest.fixture(scope="module")
def folders(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    parent = tmp_path_factory.mktemp("weights")
    return [tiny_llama, *(perturbed(tiny_llama, parent / f"seed-{seed}", seed) for seed in (1, 2))]


@pytest.fixture(scope="module")
def routers(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, Stack]]:
    stack = make_stack(tmp_path_factory.mktemp("stack"), tiny_llama, decode=2, worker_flags=["--dtype", "float32"])
    stack.processes["decode-1"].command += ["--tensor-parallel", "2"]
    make_answers_holdable(stack)
    second = stack.add_router("router-1")
    for served in run(stack):
        second.wait_ready()
        yield served, second


def reload(stack: Stack, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "baton.cli", "reload", "--model", str(folder), *arguments]
    command += ["--admin", f"127.0.0.1:{stack.admin_port}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def expected(folder: Path, tokens: int = TOKENS) -> tuple[int, ...]:
    return tuple(greedy(merged_model(folder, None), PROMPT, tokens))


async def ask(stack: Stack, tokens: int = TOKENS) -> tuple[tuple[int, ...], int]:
    """Return the answer, and how many tokens of the prompt were cached."""
    async with AsyncBatonClient(stack.target) as client:
        answer = await client.complete(PROMPT, max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return answer.choices[0].token_ids, answer.usage.cached_tokens


def fingerprint(stack: Stack) -> str:
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    asked = urllib.request.Request(f"{stack.url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=30) as answer:
        return str(json.loads(answer.read())["system_fingerprint"])


@asynccontextmanager
async def streams_that_stand_still(
    routers: tuple[Stack, Stack],
) -> AsyncIterator[list["asyncio.Task[tuple[tuple[int, ...], int]]"]]:
    """Pause a stream at each router until the block is left."""
    with answers_held(routers[0], HELD_TOKENS) as held:
        streams = [asyncio.create_task(ask(router, LONG)) for router in routers]
        await eventually(lambda: all(router.status().active_requests for router in routers))
        await held.worker()
        yield streams


async def test_streams_end_on_old_weights_and_new_requests_use_new_ones_without_old_cache(
    routers: tuple[Stack, Stack], folders: list[Path]
) -> None:
    first, second = routers
    old, new = expected(folders[0]), expected(folders[1])
    for router in routers:
        assert (await ask(router))[0] == old
    before = fingerprint(first)
    async with streams_that_stand_still(routers) as streams:
        done = await asyncio.to_thread(reload, first, folders[1])
    assert done.returncode == 0, done.stderr
    for router in routers:
        answer, cached = await ask(router)
        assert answer == new
        assert cached == 0 or router is second
    assert [answer for answer, _ in await asyncio.gather(*streams)] == [expected(folders[0], LONG)] * 2
    assert fingerprint(first) == first.status().model_version == second.status().model_version != before
    assert first.status().model_version in done.stdout


async def test_workers_killed_in_and_after_a_reload_serve_the_current_version(
    routers: tuple[Stack, Stack], folders: list[Path]
) -> None:
    first, second = routers
    reloading = asyncio.create_task(asyncio.to_thread(reload, second, folders[2]))
    first.processes["decode-0"].kill()
    first.processes["decode-0"].start()
    await reloading
    answers = {(await ask(router))[0] for router in routers}
    assert answers in ({expected(folders[1])}, {expected(folders[2])})
    assert reload(first, folders[2]).returncode == 0
    for worker in ("decode-1", "prefill-0"):
        first.processes[worker].kill()
        first.processes[worker].start()
        for router in routers:
            assert (await ask(router))[0] == expected(folders[2])
    first.wait_for(lambda: not any(each.refused for each in second.status().workers), WITHIN_S, "all have the weights")


async def test_streams_that_outlast_the_grace_fail_by_name(routers: tuple[Stack, Stack], folders: list[Path]) -> None:
    first, _ = routers
    async with streams_that_stand_still(routers) as streams:
        assert (await asyncio.to_thread(reload, first, folders[1], "--grace-s", "0")).returncode == 0
        for ended in await asyncio.gather(*streams, return_exceptions=True):
            assert isinstance(ended, BatonClientError) and "were replaced" in str(ended)
    assert (await ask(first))[0] == expected(folders[1])


async def test_checkpoint_of_another_shape_is_refused_by_name_and_nothing_changes(
    routers: tuple[Stack, Stack], folders: list[Path], tmp_path: Path
) -> None:
    first, _ = routers
    before = first.status().model_version
    refused = reload(first, perturbed(folders[0], tmp_path / "other", seed=4, hidden_size=48))
    assert refused.returncode == 1
    assert "hidden_size is 48" in refused.stderr
    assert first.status().model_version == before
