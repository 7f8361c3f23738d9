"""Files below the pools of real workers: over a change of role, a restart, an edited model, a wrong bound."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.engine.config.model_config import ModelError
from baton.engine.prepare import ModelOptions, PreparedModel, prepare_model
from baton.process.config import ByteSize
from baton.protos import session_pb2
from baton.worker.tier.tier import tier_identity
from tests.fixtures.session_client import SessionClient, eventually
from tests.worker.test_role_change import answer, change, command, elastic

CACHED = 40  # tokens of the prompt of these commands, in whole blocks


def prepared(folder: Path, **changes: object) -> PreparedModel:
    options = ModelOptions(folder, torch.device("cpu"), "float32", 4, 1 << 20, None, "auto")
    return prepare_model(replace(options, **changes))  # type: ignore[arg-type]


async def test_kv_of_a_prefill_worker_is_there_for_a_decode_worker_after_a_restart(
    checkpoint: Path, tmp_path: Path
) -> None:
    flags = {"kv_tier_dir": tmp_path, "kv_tier_size": ByteSize(4 << 20), "kv_tier_load": "always"}
    async with elastic(checkpoint, "decode") as (_, endpoint):
        tokens, _ = await answer(endpoint, 1, epoch=1)
    async with elastic(checkpoint, "prefill", **flags) as (worker, endpoint):
        async with SessionClient(endpoint) as router:
            await router.send(prefill=session_pb2.Prefill(**command(2)))
            await router.one("first_step", 2)
            await router.cancel(2)
            await change(worker, router, session_pb2.ROLE_DECODE)
        assert await answer(endpoint, 3, epoch=2) == (tokens, CACHED), "from the pool, which stays"
        assert worker.host.tier is not None
        assert worker.host.tier.state.blocks >= CACHED // 4
    async with elastic(checkpoint, "decode", **flags) as (worker, endpoint):
        assert worker.host.tier is not None
        assert await answer(endpoint, 4, epoch=1) == (tokens, CACHED), "from the files"
        assert worker.host.tier.state.hit_blocks == CACHED // 4
        await eventually(lambda: worker.host.blocks.counts.held == 0)


async def test_bound_below_any_model_is_rejected_with_the_smallest_valid_one(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="kv-tier-size: 1000 bytes are too few"):
        async with elastic(checkpoint, "prefill", kv_tier_dir=tmp_path, kv_tier_size=ByteSize(1000)):
            pass


def test_edited_weight_changes_the_identity_despite_an_equal_fingerprint(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "model")
    before = prepared(tmp_path / "model")
    identity = tier_identity(before)
    assert tier_identity(prepared(tmp_path / "model")) == identity
    os.utime(tmp_path / "model" / "model.safetensors", ns=(1, 1))
    after = prepared(tmp_path / "model")
    assert after.fingerprint == before.fingerprint
    assert tier_identity(after) != identity


def test_other_arithmetic_is_another_identity_though_workers_may_exchange_kv(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an answer from files would part from one that is computed, after an update of the kernels."""
    of = prepared(checkpoint)
    identity, fingerprint = tier_identity(of), of.fingerprint
    monkeypatch.setattr(PreparedModel, "arithmetic", property(lambda prepared: "other kernels"))
    assert of.fingerprint == fingerprint
    assert tier_identity(of) != identity


def test_another_layout_type_or_number_of_ranks_is_another_identity(checkpoint: Path) -> None:
    of = [
        prepared(checkpoint),
        prepared(checkpoint, block_tokens=8),
        prepared(checkpoint, kv_cache_dtype="int8"),
        prepared(checkpoint, tensor_parallel=2),
    ]
    assert len({tier_identity(each) for each in of}) == len(of)
