"""`baton bench engine` on a tiny model: what it prints, and the counts behind its fractions."""

import json
from pathlib import Path

import pytest
import torch

from baton.engine.prepare import ModelOptions, prepare_model
from baton.lab.benchmarks.engine.speed import run_engine_bench
from baton.lab.commands.bench_options import EngineBenchOptions
from baton.lab.report import limits
from baton.lab.report.limits import decode_step_bytes, prefill_flop
from tests.fixtures.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("bench"), "llama")


def options(folder: Path, json: bool) -> EngineBenchOptions:
    threads = torch.get_num_threads()
    return EngineBenchOptions(
        model=str(folder), threads=threads, prompt_tokens=40, new_tokens=5, batch="1,3", json=json
    )


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(limits, "MATRIX_SIZE", 64)


def test_json_of_the_engine_has_an_object_per_batch(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_engine_bench(options(folder, json=True)) == 0
    (found,) = json.loads(capsys.readouterr().out)["rounds"]
    assert list(found) == ["1", "3"]
    for speed in found.values():
        assert speed["prompt_tokens"] == 40
        for name in ("prefill_tokens_per_s", "decode_step_ms", "read_bandwidth_fraction", "limit_read_gb_per_s"):
            assert speed[name] > 0


def test_step_reads_weights_once_and_kv_of_each_sequence(folder: Path) -> None:
    prepared = prepare_model(ModelOptions(folder, torch.device("cpu"), "float32", 32, 1 << 20, None))
    alone, together = (decode_step_bytes(prepared, batch, 100.0) for batch in (1, 5))
    assert together - alone == 400 * prepared.layout.token_bytes
    assert alone - 100 * prepared.layout.token_bytes <= prepared.weight_bytes


def test_arithmetic_grows_faster_than_the_prompt(folder: Path) -> None:
    config = prepare_model(ModelOptions(folder, torch.device("cpu"), "float32", 32, 1 << 20, None)).config
    assert 2.0 < prefill_flop(config, 200) / prefill_flop(config, 100) < 4.0
