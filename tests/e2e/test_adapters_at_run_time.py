"""Adapters are loaded and unloaded on a running stack with two routers, also when a worker dies."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.client import AdminClient, AsyncBatonClient, BatonClientError, ModelNotFound
from tests.e2e.conftest import run
from tests.e2e.held import answers_held, make_answers_holdable
from tests.e2e.stack import Stack, make_stack
from tests.fixtures.adapters import ALL_PROJECTIONS, greedy, make_adapter, merged_model
from tests.fixtures.paged import random_prompt
from tests.fixtures.waiting import eventually

TOKENS, LONG, WITHIN_S = 16, 120, 60.0
HELD_TOKENS = 60  # after which an answer pauses until its adapter is unloaded
PROMPT = random_prompt(70)


@pytest.fixture(scope="module")
def folders(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("adapters")
    return {
        name: make_adapter(parent / name, tiny_llama, seed, rank=4, targets=ALL_PROJECTIONS)
        for seed, name in enumerate(("one", "two"), start=1)
    }


@pytest.fixture(scope="module")
def routers(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, Stack]]:
    stack = make_stack(tmp_path_factory.mktemp("stack"), tiny_llama, decode=2, worker_flags=["--dtype", "float32"])
    make_answers_holdable(stack)
    second = stack.add_router("router-1")
    for served in run(stack):
        second.wait_ready()
        yield served, second


def admin_of(stack: Stack) -> str:
    return f"127.0.0.1:{stack.admin_port}"


def baton(stack: Stack, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "baton.cli", "adapter", *arguments, "--admin", admin_of(stack)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def expected(checkpoint: Path, folder: Path | None, tokens: int = TOKENS) -> tuple[int, ...]:
    return tuple(greedy(merged_model(checkpoint, folder), PROMPT, tokens))


async def ask(stack: Stack, model: str, tokens: int = TOKENS) -> tuple[tuple[int, ...], int]:
    """Return the answer, and how many tokens of the prompt were cached."""
    async with AsyncBatonClient(stack.target) as client:
        answer = await client.complete(PROMPT, model=model, max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return answer.choices[0].token_ids, answer.usage.cached_tokens


async def names(stack: Stack) -> list[str]:
    async with AsyncBatonClient(stack.target) as client:
        return [model.name for model in await client.models()][1:]


async def test_adapter_is_loaded_replaced_and_unloaded_at_both_routers(
    routers: tuple[Stack, Stack], tiny_llama: Path, folders: dict[str, Path]
) -> None:
    first, second = routers
    one, two = (expected(tiny_llama, folders[name]) for name in ("one", "two"))
    loaded = baton(first, "load", "sql", str(folders["one"]))
    assert loaded.returncode == 0, loaded.stderr
    assert "sql is loaded on" in loaded.stdout
    for router in routers:
        assert await names(router) == ["sql"]
        assert (await ask(router, "sql"))[0] == one
    assert (await ask(first, "sql"))[1] > 0

    refused = baton(first, "load", "sql", str(folders["two"]))
    assert refused.returncode == 1
    assert "another adapter has the name 'sql'; unload or replace it" in refused.stderr
    assert (await ask(second, "sql"))[0] == one

    assert baton(second, "load", "sql", str(folders["two"]), "--replace").returncode == 0
    for router in routers:
        answer, cached = await ask(router, "sql")
        assert answer == two
        if router is first:
            assert cached == 0  # the KV of the earlier adapter with this name is not used
    unloaded = baton(first, "unload", "sql")
    assert (unloaded.returncode, unloaded.stdout) == (0, "sql is unloaded\n")
    for router in routers:
        assert await names(router) == []
        with pytest.raises(ModelNotFound, match="sql"):
            await ask(router, "sql")
    assert json.loads(baton(second, "list", "--json").stdout) == []
    assert baton(first, "unload", "sql").returncode == 1


async def test_stream_ends_on_the_adapter_unloaded_meanwhile(
    routers: tuple[Stack, Stack], tiny_llama: Path, folders: dict[str, Path]
) -> None:
    first, second = routers
    assert baton(first, "load", "sql", str(folders["one"])).returncode == 0
    with answers_held(first, HELD_TOKENS) as held:
        streams = [asyncio.create_task(ask(router, "sql", LONG)) for router in routers]
        await eventually(lambda: all(router.status().active_requests for router in routers))
        worker = await held.worker()
        with AdminClient(admin_of(second)) as admin:
            assert worker in admin.unload_adapter("sql")
    wanted = expected(tiny_llama, folders["one"], LONG)
    assert [answer for answer, _ in await asyncio.gather(*streams)] == [wanted] * 2
    with pytest.raises(ModelNotFound):
        await ask(first, "sql")
    first.wait_for(lambda: not json.loads(baton(first, "list", "--json").stdout), WITHIN_S, "the adapter is freed")


async def test_restarted_worker_has_the_adapter_before_its_requests(
    routers: tuple[Stack, Stack], tiny_llama: Path, folders: dict[str, Path]
) -> None:
    first, _ = routers
    assert baton(first, "load", "sql", str(folders["one"])).returncode == 0
    wanted = expected(tiny_llama, folders["one"])
    for worker in ("decode-0", "prefill-0"):
        process = first.processes[worker]
        process.kill()
        process.start()
        for router in routers:
            assert (await ask(router, "sql"))[0] == wanted  # from the remaining worker or the restarted one

    def at(router: Stack) -> bool:
        with AdminClient(admin_of(router)) as admin:
            [sql] = admin.adapters()
            return len(sql.worker_ids) == 3 and not sql.missing

    def everywhere() -> bool:
        return all(map(at, routers))

    first.wait_for(everywhere, WITHIN_S, "all workers have it again")
    first.processes["decode-1"].kill()  # so that the restarted worker answers
    for router in routers:
        assert (await ask(router, "sql"))[0] == wanted
    first.processes["decode-1"].start()
    first.wait_for(everywhere, WITHIN_S, "all workers have it again")
    assert baton(first, "unload", "sql").returncode == 0


async def test_if_one_worker_cannot_take_it_none_keeps_it(
    routers: tuple[Stack, Stack], tmp_path: Path, folders: dict[str, Path]
) -> None:
    first, _ = routers
    with AdminClient(admin_of(first)) as admin:
        with pytest.raises(BatonClientError, match=r"-\d cannot load \S+: .*there is no adapter_config.json"):
            admin.load_adapter("sql", str(tmp_path))
        assert admin.adapters() == ()
    assert await names(first) == []
