"""How many files a reader visits who follows one step of decode through the engine: from its plan to its tokens."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.request import Request
from baton.engine.runner.engine import Engine
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.budget import StepBudget
from baton.engine.scheduler.scheduler import Scheduler
from baton.text.block_hash import root_hash
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import PagedModel, random_prompt

MOST_FILES = 16
ROOT = Path(__file__).resolve().parents[2]
BLOCK, BLOCKS = 16, 8
PARAMS = SamplingParams(max_tokens=40), SamplingParams(max_tokens=40, temperature=1.0, top_p=0.9, seed=3)


class Visits:
    """Files of this repository whose functions are called while it is entered, without tests."""

    def __init__(self) -> None:
        self.files: dict[str, list[str]] = {}

    def __enter__(self) -> "Visits":
        sys.setprofile(self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            path = Path(frame.f_code.co_filename)
            if path.is_absolute() and path.resolve().is_relative_to(ROOT):
                inside = path.resolve().relative_to(ROOT)
                if inside.parts[0] not in ("tests", ".venv"):
                    self.files.setdefault(str(inside), []).append(frame.f_code.co_qualname)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("decode_path"), "llama")


def running(checkpoint: Path, budget: StepBudget) -> Engine:
    """With native kernels, as a worker loads a model; two answers are in the middle."""
    paged = PagedModel(checkpoint, BLOCK, BLOCKS, torch.float32, packed=True)
    scheduler = Scheduler(BlockPool(BLOCKS), BLOCK, 64, max_sequences=8, budget=budget)
    engine = Engine(paged.runner, scheduler)
    for number, params in enumerate(PARAMS):
        scheduler.add(Request(number, tuple(random_prompt(9 + number)), params, ()), root_hash(b"model", "float32"))
    for _ in range(12):
        assert engine.step()
    return engine


def test_a_reader_of_one_decode_step_visits_few_files(checkpoint: Path) -> None:
    engine = running(checkpoint, StepBudget())
    with Visits() as visits:
        outcomes = engine.step()
    assert outcomes is not None and len(outcomes) == len(PARAMS), "a pure decode step"
    lines = [f"{file}: {', '.join(dict.fromkeys(calls))}" for file, calls in sorted(visits.files.items())]
    assert len(lines) <= MOST_FILES, f"{len(lines)} files:\n" + "\n".join(lines)
