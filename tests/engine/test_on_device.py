"""What is made for a GPU while a process starts or reloads: there, whole for every stream, or refused. CUDA is stood in
for.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.engine import load
from baton.engine.config.model_config import ModelError
from baton.engine.kv_cache.memory import LargestStep, prepare_with_spare_memory
from baton.engine.models import encoder, transformers_checkpoint
from baton.engine.parallel.shard import ALONE
from baton.engine.prepare import ModelOptions, prepare_model
from baton.engine.runner.runner import Runner
from baton.worker.transfer import pool
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.encoders import make_encoder
from tests.fixtures.metered_rank import ToldMeter
from tests.fixtures.paged import CPU

SECOND = torch.device("cuda", 1)
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens on which GPU, in order."""
    happened: list[str] = []
    current = [0]

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device.index)
        try:
            yield
        finally:
            current.pop()

    def note(what: str) -> None:
        happened.append(f"{what} on {current[-1]}")

    def stream(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(synchronize=lambda: happened.append(f"waited for {device.index}"))

    def made(*arguments: Any, **named: Any) -> Any:
        note("made")
        return SimpleNamespace(adaptable_modules=dict)

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(load, "MatmulBackend", lambda device, dtype, packed: None)
    monkeypatch.setattr(load, "with_native_layers", lambda model: model)
    monkeypatch.setattr(load, "parallel_part", lambda model, collectives: model)
    for module, name in (
        (load, "_load_decoder"),
        (encoder, "load_encoder"),
        (transformers_checkpoint, "load_transformers_model"),
    ):
        monkeypatch.setattr(module, name, made)
    return happened


def load_whole(folder: Path) -> None:
    load.load_model(folder, torch.float32, SECOND, progress=False)


def load_part(folder: Path) -> None:
    load.load_part(folder, torch.float32, SECOND, False, "none", SimpleNamespace(shard=ALONE))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "family", "load_it"),
    [
        (make_checkpoint, "llama", load_whole),
        (make_checkpoint, "llama", load_part),
        (make_checkpoint, "gpt2", load_whole),
        (make_encoder, "bert", load_whole),
    ],
    ids=["decoder", "rank", "transformers", "encoder"],
)
def test_model_is_made_on_its_device_and_whole_for_other_streams(
    make: Callable[[Path, str], Path],
    family: str,
    load_it: Callable[[Path], None],
    events: list[str],
    tmp_path: Path,
) -> None:
    load_it(make(tmp_path, family))
    assert events == ["made on 1", "waited for 1"]


def full(*arguments: Any, **named: Any) -> Any:
    raise FULL


def test_model_that_does_not_fit_is_refused_with_its_size(
    events: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "_load_decoder", full)
    folder = make_checkpoint(tmp_path, "llama")
    with pytest.raises(
        ModelError, match=rf"out of memory on cuda:1 for the weights of {folder}, files of \d+ MiB: CUDA out"
    ):
        load_whole(folder)
    assert events == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_pool_that_does_not_fit_is_refused_with_its_size(
    ranks: int, events: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ModelOptions(make_checkpoint(tmp_path, "llama"), CPU, "float32", 16, 64 << 20, None, tensor_parallel=ranks)
    prepared = prepare_model(asked)
    prepared = replace(prepared, options=replace(asked, device=SECOND))
    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(
        ModelError, match=rf"out of memory on cuda:1 for a KV pool of {64 // ranks} MiB: CUDA out of memory"
    ):
        pool._allocate(prepared)


def test_weights_that_leave_no_room_for_a_step_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "run", full)
    asked = ModelOptions(make_checkpoint(tmp_path, "llama"), CPU, "float32", 16, 0, None)
    with pytest.raises(
        ModelError, match="for a step of 20 tokens and 3 sequences in addition to the weights: CUDA out"
    ):
        prepare_with_spare_memory(asked, LargestStep(20, 3), 0.9, meter=lambda device: ToldMeter(1 << 30))
