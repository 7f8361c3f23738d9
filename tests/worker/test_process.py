"""What a worker's process does before anything else."""

import asyncio
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from baton.engine.config.model_config import ModelError
from baton.engine.kv_cache.memory import LargestStep
from baton.prefill_worker.config import PrefillConfig
from baton.process.serving.exit_codes import ExitCode
from baton.worker import process
from baton.worker.process import run_worker
from baton.worker.transfer import pool


@pytest.mark.parametrize(
    ("device", "transport", "expected"),
    [
        ("cuda:0", "auto", ["environment", "model"]),
        ("cuda:0", "nccl", ["environment", "model"]),
        ("cuda:0", "nixl", ["model"]),
        ("cpu", "auto", ["model"]),
    ],
)
def test_environment_of_nccl_is_there_before_a_model_is_prepared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, transport: str, expected: list[str]
) -> None:
    """With `--kv-memory auto` ranks have computed a step by then, and NCCL reads its environment once."""
    calls: list[str] = []

    def prepare(*arguments: object) -> None:
        calls.append("model")
        raise ModelError("no model")

    monkeypatch.setattr(pool, "prepare_environment", lambda interface, timeout_s: calls.append("environment"))
    monkeypatch.setattr(process, "prepare", prepare)
    monkeypatch.setattr(process, "run", asyncio.run)
    monkeypatch.setattr(process, "configure_logging", Mock())
    monkeypatch.setattr(sys, "setswitchinterval", Mock())
    config = PrefillConfig(worker_id="w", model=tmp_path, device=device, transport=transport, transfer_interface="lo")
    assert run_worker(config, LargestStep(1, 1), Mock()) == ExitCode.WRONG_CONFIGURATION
    assert calls == expected
