"""From a checkpoint and a budget to a pool: what fits, and what the error says would."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from baton.engine.config.model_config import ModelError
from baton.engine.prepare import ModelOptions, prepare_model, resolve_dtype
from baton.engine.runner.thread import EngineThread
from baton.engine.runner.thread_preparation import thread_preparation
from baton.text.weight_files import SINGLE_FILE
from tests.fixtures.checkpoints import make_checkpoint

MIB = 2**20


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> ModelOptions:
    folder = make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "llama", seed=3)
    return ModelOptions(folder, torch.device("cpu"), "float32", 16, 4 * MIB, None)


def test_pool_is_as_large_as_the_memory_allows(options: ModelOptions) -> None:
    prepared = prepare_model(options)
    assert prepared.total_blocks == options.kv_memory_bytes // prepared.layout.block_bytes
    assert prepared.pool_bytes <= options.kv_memory_bytes
    assert prepared.max_model_len <= prepared.config.max_positions


def test_little_memory_shortens_the_longest_answer(options: ModelOptions) -> None:
    block_bytes = prepare_model(options).layout.block_bytes
    assert prepare_model(replace(options, kv_memory_bytes=3 * block_bytes)).max_model_len == 48


def test_error_says_how_much_memory_would_do(options: ModelOptions) -> None:
    block_bytes = prepare_model(options).layout.block_bytes
    short = replace(options, kv_memory_bytes=2 * block_bytes, max_model_len=33)
    with pytest.raises(ModelError, match=f"need {3 * block_bytes} bytes") as refused:
        prepare_model(short)
    assert "32 tokens" in str(refused.value)
    prepare_model(replace(short, kv_memory_bytes=3 * block_bytes))


def test_pool_of_less_than_two_blocks_is_rejected(options: ModelOptions) -> None:
    with pytest.raises(ModelError, match="kv-memory"):
        prepare_model(replace(options, kv_memory_bytes=1))


def test_more_than_the_model_has_positions_for_is_refused(options: ModelOptions) -> None:
    with pytest.raises(ModelError, match="positions"):
        prepare_model(replace(options, max_model_len=10**9))


def test_fingerprint_knows_the_layout(options: ModelOptions) -> None:
    same = prepare_model(replace(options, kv_memory_bytes=2 * MIB)).fingerprint
    assert prepare_model(options).fingerprint == same
    assert prepare_model(replace(options, block_tokens=32)).fingerprint != same
    assert prepare_model(replace(options, dtype="bfloat16")).fingerprint != same


@pytest.mark.parametrize(("bf16", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_takes_bf16_only_where_it_is_fast(
    options: ModelOptions, bf16: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("baton.engine.prepare.has_bf16_arithmetic", lambda: bf16)
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    assert resolve_dtype(replace(options, dtype="auto", folder=tmp_path)) is expected


@pytest.mark.parametrize("stored", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_dtype_that_config_json_lacks_is_that_of_the_weights(
    options: ModelOptions, stored: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("baton.engine.prepare.has_bf16_arithmetic", lambda: True)
    (tmp_path / "config.json").write_text("{}")
    tensors = {"ids": torch.zeros(1, dtype=torch.int64), "weight": torch.zeros(1, dtype=stored)}
    save_file(tensors, tmp_path / SINGLE_FILE)
    expected = torch.float32 if stored.itemsize > 2 else torch.bfloat16
    assert resolve_dtype(replace(options, dtype="auto", folder=tmp_path)) is expected


def test_unknown_dtype_is_named(options: ModelOptions) -> None:
    with pytest.raises(ModelError, match="int3"):
        resolve_dtype(replace(options, dtype="int3"))


def test_loaded_runner_warms_up_on_its_cores(options: ModelOptions) -> None:
    prepared = prepare_model(options)
    runner = prepared.load(torch.zeros(prepared.pool_bytes, dtype=torch.uint8), progress=False)
    everywhere = os.sched_getaffinity(0)
    core = frozenset({min(everywhere)})

    class Idle:
        def step(self) -> list[Any] | None:
            return None

    faults: list[BaseException] = []
    prepare = thread_preparation(core, torch.device("cpu"), runner)
    thread: EngineThread[Any, None] = EngineThread(Idle(), lambda *_: None, faults.append, lambda: None, prepare)
    thread.start()
    assert thread.call(os.sched_getaffinity, 0).result(30) == core
    assert thread.stop(5) and not faults
    assert os.sched_getaffinity(0) == everywhere
