"""Weights that take the place of a real worker's, beside requests that run with those before."""

import gc
import weakref
from pathlib import Path

import pytest
import torch

from baton.engine.kv_cache.memory import LargestStep, prepare_with_spare_memory
from baton.engine.kv_cache.sizing import GPU_RESERVE_BYTES
from baton.engine.lora.adapters import AdapterSet
from baton.engine.models.decoder import DecoderModel
from baton.engine.prepare import ModelOptions, prepare_model
from baton.process.registry.worker_record import WEIGHTS
from baton.protos import session_pb2
from baton.text.block_hash import block_hashes, root_hash
from baton.worker.adapters.engine import EngineAdapters, EngineWeights
from tests.fixtures.adapters import greedy, make_adapter, merged_model
from tests.fixtures.metered_rank import ToldMeter
from tests.fixtures.paged import CPU
from tests.fixtures.perturbed import perturbed
from tests.fixtures.real_workers import BLOCK_TOKENS, RealPair, held_after
from tests.fixtures.session_client import SessionClient, eventually
from tests.worker.adapters.test_listed_adapters import (
    LONG,
    PROMPT,
    TOKENS,
    answer,
    as_new_router,
    checkpoint,
    ended,
    load,
    pair_of,
    prepare,
    start,
    state,
    tell,
)

__all__ = ["checkpoint"]
pytestmark = pytest.mark.usefixtures("forked_ranks")
OWN = session_pb2.Adapter()


@pytest.fixture(scope="module")
def other(checkpoint: Path) -> Path:
    return perturbed(checkpoint, checkpoint.parent / "other", seed=1)


def expected(folder: Path, tokens: int = TOKENS) -> list[int]:
    return greedy(merged_model(folder, None), PROMPT, tokens)


@pytest.mark.parametrize("ranks", [1, 2])
async def test_prefill_and_decode_use_new_weights_and_no_kv_of_the_old(
    checkpoint: Path, other: Path, ranks: int
) -> None:
    async with pair_of(checkpoint, ranks) as pair:
        assert await pair.finish(await pair.compute(1, PROMPT, TOKENS)) == expected(checkpoint)
        digest = (await load(pair, WEIGHTS, other)).digest
        old, new = expected(checkpoint), expected(other)
        assert old != new
        computed = await pair.compute(2, PROMPT, TOKENS, adapter=WEIGHTS, adapter_digest=digest)
        assert await pair.finish(computed) == new


async def test_answer_ends_on_old_weights_next_to_new_ones_and_they_are_freed(checkpoint: Path, other: Path) -> None:
    async with pair_of(checkpoint) as pair:
        client = pair.to_decode
        before = start(1, OWN, LONG)
        with held_after(pair.decode, steps=1) as loop:
            await client.send(start=before)
            await client.one("first_step", 1)
            weights = await load(pair, WEIGHTS, other)
            after = start(2, weights)
            await client.send(start=after)
            await eventually(lambda: loop.load.waiting_sequences == 1)
            assert not state(client).own_weights_freed
        assert await ended(client, after) == expected(other)
        assert await ended(client, before) == expected(checkpoint, LONG)
        await eventually(lambda: state(client).own_weights_freed)
        assert await answer(client, start(3, weights)) == expected(other)
        await client.send(start=start(4, OWN))
        assert "were replaced and freed" in (await client.one("failed", 4)).message


@pytest.mark.parametrize("measured", [False, True], ids=["stated", "measured"])
def test_memory_of_replaced_weights_is_free_also_where_the_pool_was_measured(
    checkpoint: Path, other: Path, measured: bool
) -> None:
    asked = ModelOptions(checkpoint, CPU, "float32", BLOCK_TOKENS, 8 << 20, None)
    prepared = prepare_model(asked)
    if measured:
        meter = ToldMeter((16 << 20) + GPU_RESERVE_BYTES // 2)
        prepared = prepare_with_spare_memory(asked, LargestStep(20, 3), 0.9, AdapterSet(), meter=lambda device: meter)
    adapters = prepared.adapters or AdapterSet()
    runner = prepared.load(torch.zeros(prepared.storage_bytes, dtype=torch.uint8), False, adapters)
    engine = EngineAdapters(adapters, None, EngineWeights(prepared, runner))
    assert isinstance(runner.model, DecoderModel)
    old = weakref.ref(runner.model.norm.weight)
    read = engine.read(WEIGHTS, other)
    engine.load(read, lambda function: function())
    engine.add(read)
    engine.remove(0)
    gc.collect()
    assert old() is None


async def test_weights_that_a_router_still_needs_stay(checkpoint: Path, other: Path) -> None:
    async with pair_of(checkpoint) as pair:
        client = pair.to_decode
        [own] = pair.decode._host.adapter_table.weights
        weights = await prepare(client, 1, WEIGHTS, other)
        listed = session_pb2.Adapter(name=WEIGHTS, digest=weights.digest, path=str(other))
        await tell(client, 1, listed, in_use=(own.key.digest,))
        assert await answer(client, start(1, OWN)) == expected(checkpoint)
        await tell(client, 1, listed)
        await eventually(lambda: state(client).own_weights_freed)


async def test_worker_without_the_listed_weights_loads_them(checkpoint: Path, other: Path) -> None:
    async with pair_of(checkpoint) as pair:
        client = pair.to_decode
        digest = (await prepare(pair.to_prefill, 1, WEIGHTS, other)).digest
        weights = session_pb2.Adapter(name=WEIGHTS, digest=digest, path=str(other))
        await tell(client, 5, weights)
        await eventually(lambda: [each.digest for each in state(client).usable] == [digest])
        assert await answer(client, start(1, weights)) == expected(other)


def named(pair: RealPair, command: session_pb2.Start) -> session_pb2.Start:
    """As a router names the blocks of a prompt and its answer: the digest of other weights than its own counts."""
    prepared = pair.prepared
    command.cache_root = root_hash(prepared.fingerprint, str(prepared.dtype), command.adapter_digest)
    command.block_hashes.extend(block_hashes(command.cache_root, PROMPT, BLOCK_TOKENS))
    return command


async def found_tokens(client: SessionClient, attempt_id: int) -> tuple[int, int]:
    """Of the prompt: cached, and of those loaded from files."""
    timings = (await client.one("first_step", attempt_id)).timings
    return timings.cached_tokens, timings.restored_tokens


async def test_colocated_worker_finds_no_kv_of_old_weights_in_pool_or_files(
    checkpoint: Path, other: Path, tmp_path: Path
) -> None:
    async with pair_of(checkpoint, kv_tier_dir=tmp_path) as pair:
        client, files = pair.to_decode, pair.decode._host.tier
        assert files is not None
        for attempt_id, cached in ((1, 0), (2, BLOCK_TOKENS)):
            assert await answer(client, named(pair, start(attempt_id, OWN))) == expected(checkpoint)
            assert await found_tokens(client, attempt_id) == (cached, 0)
        await eventually(lambda: files.state.blocks > 0)
        weights = await load(pair, WEIGHTS, other)
        assert await answer(client, named(pair, start(3, weights))) == expected(other)
        assert await found_tokens(client, 3) == (0, 0)
        await eventually(lambda: files.state.blocks > 1)
    async with pair_of(checkpoint, kv_tier_dir=tmp_path) as pair:  # has the files, and an empty pool
        client = pair.to_decode
        assert await answer(client, named(pair, start(1, OWN))) == expected(checkpoint)
        weights = await load(pair, WEIGHTS, other)
        assert await answer(client, named(pair, start(2, weights))) == expected(other)
        for attempt_id in (1, 2):
            assert await found_tokens(client, attempt_id) == (BLOCK_TOKENS, BLOCK_TOKENS)


async def refusal(client: SessionClient, change_id: int, path: Path) -> str:
    return (await prepare(client, change_id, WEIGHTS, path)).refusal


async def test_other_checkpoints_and_sets_beyond_two_are_refused_by_name(
    checkpoint: Path, other: Path, tmp_path: Path
) -> None:
    strange = perturbed(checkpoint, tmp_path / "strange", seed=2, num_hidden_layers=7)
    third = perturbed(checkpoint, tmp_path / "third", seed=3)
    async with pair_of(checkpoint) as pair:
        client = pair.to_decode
        assert "num_hidden_layers is 7, and" in await refusal(client, 1, strange)
        assert "is not a folder" in await refusal(client, 2, tmp_path / "nothing")
        assert not await refusal(client, 3, other)
        assert "two sets of weights are loaded already" in await refusal(client, 4, third)
        adapter = make_adapter(tmp_path / "sql", checkpoint, 1, rank=2, targets=("q_proj",))
        await client.send(prepare_adapter=session_pb2.PrepareAdapter(change_id=3, drop=True))
        await eventually(lambda: len(pair.decode._host.adapter_table.weights) == 1)
        assert not (await prepare(client, 5, "sql", adapter)).refusal
        assert "adapters of the present weights are loaded: sql" in await refusal(client, 6, other)
        assert await answer(client, start(1, OWN)) == expected(checkpoint)


async def test_weights_that_do_not_fit_into_memory_are_refused_with_the_amounts(
    checkpoint: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.engine.reload.weights.available_bytes", lambda: 10 << 10)
    async with pair_of(checkpoint) as pair:
        assert "MiB are free on cpu" in await refusal(pair.to_decode, 1, other)
        await as_new_router(pair.to_decode)
        assert await answer(pair.to_decode, start(1, OWN)) == expected(checkpoint)
