"""Adapters that routers add to real workers and take away, beside requests that run with them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from baton.protos import sampling_pb2, session_pb2
from baton.versions import OWN
from baton.worker.adapters.table import AdapterKey
from baton.worker.transfer.wire import versions_message
from tests.fixtures.adapters import ALL_PROJECTIONS, greedy, make_adapter, merged_model
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import random_prompt
from tests.fixtures.real_workers import RealPair, held_after, real_pair
from tests.fixtures.session_client import SessionClient, eventually

pytestmark = pytest.mark.usefixtures("forked_ranks")
PROMPT, TOKENS, LONG = random_prompt(40), 12, 150


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "base", "qwen3", seed=6)


@pytest.fixture(scope="module")
def folders(checkpoint: Path) -> dict[str, Path]:
    return {
        name: make_adapter(checkpoint.parent / name, checkpoint, seed, rank=3, targets=ALL_PROJECTIONS)
        for seed, name in enumerate(("one", "two"), start=1)
    }


@asynccontextmanager
async def pair_of(checkpoint: Path, ranks: int = 1, kv_tier_dir: Path | None = None) -> AsyncIterator[RealPair]:
    async with real_pair(checkpoint, prefill_ranks=ranks, decode_ranks=ranks, kv_tier_dir=kv_tier_dir) as pair:
        for client in (pair.to_prefill, pair.to_decode):
            await as_new_router(client)
        yield pair


async def as_new_router(client: SessionClient) -> None:
    await client.disconnect()
    client.versions = versions_message(OWN)
    await client.connect()


async def prepare(client: SessionClient, change_id: int, name: str, path: Path) -> session_pb2.AdapterPrepared:
    asked = session_pb2.PrepareAdapter(change_id=change_id, name=name, path=str(path))
    await client.send(prepare_adapter=asked)

    def answers() -> list[Any]:
        return [each for each in client.of_kind("adapter_prepared") if each.change_id == change_id]

    found: session_pb2.AdapterPrepared = (await eventually(answers))[0]
    return found


async def tell(
    client: SessionClient, version: int, *adapters: session_pb2.Adapter, in_use: tuple[str, ...] = ()
) -> None:
    sent = session_pb2.AdapterList(version=version, adapters=adapters, digests_in_use=in_use)
    await client.send(adapter_list=sent)


def state(client: SessionClient) -> session_pb2.AdapterState:
    assert client.welcome is not None
    states: list[session_pb2.AdapterState] = client.of_kind("adapter_state")
    return [client.welcome.worker.adapter_state, *states][-1]


def usable(client: SessionClient) -> list[str]:
    return [each.name for each in state(client).usable]


async def load(pair: RealPair, name: str, path: Path, version: int = 1) -> session_pb2.Adapter:
    """On both workers."""
    clients = (pair.to_prefill, pair.to_decode)
    [digest] = {(await prepare(client, version, name, path)).digest for client in clients}
    adapter = session_pb2.Adapter(name=name, digest=digest, path=str(path))
    for client in clients:
        await tell(client, version, adapter)
        await client.send(prepare_adapter=session_pb2.PrepareAdapter(change_id=version, drop=True))
    await eventually(lambda: all(state(client).version == version for client in clients))
    return adapter


def start(
    attempt_id: int, adapter: session_pb2.Adapter, tokens: int = TOKENS, digest: bool = True
) -> session_pb2.Start:
    return session_pb2.Start(
        attempt_id=attempt_id,
        transfer_id=attempt_id.to_bytes(16, "big"),
        token_ids=PROMPT,
        sampling=sampling_pb2.Sampling(max_tokens=tokens, n=1, top_p=1.0),
        time_left_ms=20_000,
        adapter=adapter.name,
        adapter_digest=adapter.digest if digest else "",
    )


async def answer(client: SessionClient, command: session_pb2.Start) -> list[int]:
    await client.send(start=command)
    return await ended(client, command)


async def ended(client: SessionClient, command: session_pb2.Start) -> list[int]:
    """Of a prompt that the decode worker computes itself."""
    attempt_id, wanted = command.attempt_id, command.sampling.max_tokens

    def later() -> list[int]:
        return [token_id for output in client.outputs(attempt_id) for token_id in output.token_ids]

    await eventually(lambda: len(later()) == wanted - 1)
    return [*(await client.one("first_step", attempt_id)).outputs[0].token_ids, *later()]


@pytest.mark.parametrize("ranks", [1, 2])
async def test_adapter_loaded_at_run_time_equals_merged_weights(
    checkpoint: Path, folders: dict[str, Path], ranks: int
) -> None:
    async with pair_of(checkpoint, ranks) as pair:
        await load(pair, "sql", folders["one"])
        wanted = greedy(merged_model(checkpoint, folders["one"]), PROMPT, TOKENS)
        assert await pair.finish(await pair.compute(1, PROMPT, TOKENS, adapter="sql")) == wanted


async def test_folder_without_an_adapter_is_rejected_with_the_reason(
    checkpoint: Path, tmp_path: Path, folders: dict[str, Path]
) -> None:
    other = make_checkpoint(tmp_path / "other", "llama", seed=1, hidden_size=32, num_hidden_layers=1)
    strange = make_adapter(tmp_path / "strange", other, 1, rank=2, targets=("q_proj",))
    async with pair_of(checkpoint) as pair:
        missing = await prepare(pair.to_decode, 1, "sql", tmp_path / "nothing")
        assert "there is no adapter_config.json" in missing.refusal
        misfit = await prepare(pair.to_decode, 2, "sql", strange)
        assert "adapter 'sql' is for a model.layers.0.self_attn.q_proj of" in misfit.refusal
        assert not usable(pair.to_decode)
        assert (await prepare(pair.to_decode, 3, "sql", folders["one"])).digest


async def test_dropped_prepared_adapter_takes_no_requests_and_no_memory(
    checkpoint: Path, folders: dict[str, Path]
) -> None:
    async with pair_of(checkpoint) as pair:
        client = pair.to_decode
        digest = (await prepare(client, 1, "sql", folders["one"])).digest
        adapter = session_pb2.Adapter(name="sql", digest=digest)
        await client.send(start=start(1, adapter))
        assert "adapter 'sql' is not loaded" in (await client.one("failed", 1)).message
        await client.send(prepare_adapter=session_pb2.PrepareAdapter(change_id=1, drop=True))
        await eventually(lambda: not pair.decode._host.adapter_table.find(_key(adapter)))


async def test_adapters_prepared_by_a_router_are_dropped_with_its_session(
    checkpoint: Path, folders: dict[str, Path]
) -> None:
    async with pair_of(checkpoint) as pair:
        client = pair.to_decode
        digest = (await prepare(client, 1, "sql", folders["one"])).digest
        client._epoch = 0  # begins anew
        await as_new_router(client)
        await eventually(
            lambda: not pair.decode._host.adapter_table.find(_key(session_pb2.Adapter(name="sql", digest=digest)))
        )


async def test_stream_ends_on_the_adapter_that_it_began_with(checkpoint: Path, folders: dict[str, Path]) -> None:
    async with pair_of(checkpoint) as pair:
        client = pair.to_decode
        old = await load(pair, "sql", folders["one"])
        before = start(1, old, LONG)
        with held_after(pair.decode, steps=1) as loop:
            await client.send(start=before)
            await client.one("first_step", 1)
            new = await load(pair, "sql", folders["two"], version=2)
            after = start(2, new)
            await client.send(start=after)
            await eventually(lambda: loop.load.waiting_sequences == 1)
        models = {name: merged_model(checkpoint, folder) for name, folder in folders.items()}
        assert await ended(client, after) == greedy(models["two"], PROMPT, TOKENS)
        assert await ended(client, before) == greedy(models["one"], PROMPT, LONG)
        await eventually(lambda: usable(client) == ["sql"])
        await client.send(start=start(3, old))
        assert "adapter 'sql' is not loaded" in (await client.one("failed", 3)).message


async def test_unlisted_adapter_stays_as_long_as_any_router_needs_it(
    checkpoint: Path, folders: dict[str, Path]
) -> None:
    async with pair_of(checkpoint) as pair, SessionClient(pair.to_decode.endpoint) as other:
        await as_new_router(other)
        first, adapter = pair.to_decode, await load(pair, "sql", folders["one"])
        await tell(first, 2)
        await eventually(lambda: state(other).version == 2)
        assert usable(other) == ["sql"]  # the other router has not said that it needs it no more
        await tell(other, 2, in_use=(adapter.digest,))
        wanted = greedy(merged_model(checkpoint, folders["one"]), PROMPT, TOKENS)
        assert await answer(other, start(1, adapter)) == wanted  # a request of it that goes on here
        assert usable(other) == ["sql"]
        await tell(other, 2)
        await eventually(lambda: not usable(other) and not usable(first))


async def test_router_of_the_previous_release_does_not_keep_adapters(
    checkpoint: Path, folders: dict[str, Path]
) -> None:
    async with pair_of(checkpoint) as pair, SessionClient(pair.to_decode.endpoint) as old:
        adapter = await load(pair, "sql", folders["one"])
        wanted = greedy(merged_model(checkpoint, folders["one"]), PROMPT, TOKENS)
        assert await answer(old, start(1, adapter, digest=False)) == wanted
        await tell(pair.to_decode, 2)
        await eventually(lambda: not usable(pair.to_decode))
        assert not old.of_kind("adapter_state")


async def test_late_worker_loads_listed_adapters_and_reports_failures(
    checkpoint: Path, tmp_path: Path, folders: dict[str, Path]
) -> None:
    async with pair_of(checkpoint) as pair:
        client = pair.to_decode
        good = await prepare(pair.to_prefill, 1, "good", folders["one"])
        entries = [
            session_pb2.Adapter(name="good", digest=good.digest, path=str(folders["one"])),
            session_pb2.Adapter(name="gone", digest="aa", path=str(tmp_path / "gone")),
            session_pb2.Adapter(name="changed", digest="bb", path=str(folders["two"])),
        ]
        await tell(client, 7, *entries)
        await eventually(lambda: usable(client) == ["good"] and len(state(client).refusals) == 2)
        why = {each.name: each.why for each in state(client).refusals}
        assert "there is no adapter_config.json" in why["gone"]
        assert "has other contents than those that are listed" in why["changed"]
        wanted = greedy(merged_model(checkpoint, folders["one"]), PROMPT, TOKENS)
        assert await answer(client, start(1, entries[0])) == wanted


def _key(adapter: session_pb2.Adapter) -> AdapterKey:
    return AdapterKey(adapter.name, adapter.digest)
