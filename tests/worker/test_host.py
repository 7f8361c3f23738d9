"""From a worker's configuration to the model that it prepares: the device, and what is refused before weights load."""

from pathlib import Path
from typing import Any

import pytest
import torch

from baton.decode_worker.config import DecodeConfig
from baton.engine.config.model_config import ModelError
from baton.engine.kv_cache.memory import LargestStep
from baton.engine.prepare import PreparedModel
from baton.worker.host import prepare


def prepared(folder: Path, device: str, tensor_parallel: int = 1) -> PreparedModel:
    config = DecodeConfig(worker_id="decode-0", model=folder, device=device, tensor_parallel=tensor_parallel)
    return prepare(config, LargestStep(64, 8))


def has_gpus(monkeypatch: pytest.MonkeyPatch, usable: bool, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_gpu_without_a_number_is_the_first(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_gpus(monkeypatch, usable=True, count=2)
    assert prepared(checkpoint, "cuda").options.device == torch.device("cuda", 0)
    assert prepared(checkpoint, "cuda:1").options.device == torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("device", "ranks", "usable", "message"),
    [
        ("cuda:1", 1, True, "device is cuda:1 and tensor-parallel is 1, but this build of torch can use 1 GPUs"),
        ("cuda", 2, True, "device is cuda:0 and tensor-parallel is 2, but .* 1 GPUs"),
        ("cuda", 1, False, "device is cuda:0 and tensor-parallel is 1, but .* 0 GPUs"),
    ],
    ids=["number", "ranks", "driver"],
)
def test_missing_gpu_is_named(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, device: str, ranks: int, usable: bool, message: str
) -> None:
    has_gpus(monkeypatch, usable, count=1)
    with pytest.raises(ModelError, match=message):
        prepared(checkpoint, device, ranks)


@pytest.mark.parametrize("option", ["kv_memory", "swap_memory", "kv_tier_memory"])
def test_prepare_with_more_memory_than_the_machine_is_rejected_with_amounts(checkpoint: Path, option: str) -> None:
    sizes: dict[str, Any] = {option: 1 << 50}
    config = DecodeConfig(worker_id="decode-0", model=checkpoint, **sizes)
    with pytest.raises(ModelError, match=rf"{option.replace('_', '-')} of 1.049e\+06 GiB .* memory here; .* at most"):
        prepare(config, LargestStep(64, 8))
