"""Adapters that come and go while an engine runs, on one rank and on two: merged weights, and all ranks or none."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from baton.engine.config.model_config import ModelError
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.lora import files
from baton.engine.lora.adapters import AdapterSet
from baton.engine.lora.files import read_named
from baton.engine.parallel.wire import AdapterToAdd
from baton.engine.prepare import ModelOptions, prepare_model
from baton.engine.request import Request
from baton.engine.runner.engine import Engine
from baton.engine.runner.runner import Runner
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequences import TokenMade
from tests.fixtures.adapters import ALL_PROJECTIONS, greedy, make_adapter, merged_model
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import random_prompt

pytestmark = pytest.mark.usefixtures("forked_ranks")
OTHER_SHAPES = {
    "gemma2": ALL_PROJECTIONS,  # norms behind the projections, soft caps
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),  # several projections in one
}
TOKENS = 10
PROMPTS = [random_prompt(length) for length in (5, 21, 40)]


class Served:
    """A runner whose adapters change between steps."""

    def __init__(self, runner: Runner, adapters: AdapterSet) -> None:
        self.runner, self.adapters = runner, adapters

    def add(self, folder: Path, digest: str | None = None) -> int:
        read = read_named(folder.name, folder)
        number = self.adapters.add(folder.name, read.adapter)
        if self.runner.other_ranks is not None:
            self.runner.other_ranks.add_adapter(AdapterToAdd(folder.name, str(folder), digest or read.digest), number)
        return number

    def remove(self, number: int) -> None:
        self.adapters.remove(number)
        if self.runner.other_ranks is not None:
            self.runner.other_ranks.remove_adapter(number)

    def answers(self, numbers: list[int]) -> list[list[int]]:
        """Of the prompts, in one batch, with these adapters."""
        groups = self.runner._layout.groups
        scheduler = Scheduler(BlockPool(groups.blocks(64), groups), 8, 16, 8)
        engine = Engine(self.runner, scheduler)
        for index, (prompt, number) in enumerate(zip(PROMPTS, numbers, strict=True)):
            scheduler.add(Request(index, tuple(prompt), SamplingParams(TOKENS), (), number), bytes(32))
        made: list[list[int]] = [[] for _ in PROMPTS]
        while (outcomes := engine.step()) is not None:
            for outcome in outcomes:
                if isinstance(outcome, TokenMade):
                    made[outcome.request_id].append(outcome.drawn.token_id)
                elif first := getattr(outcome, "first", None):
                    made[outcome.request_id].insert(0, first[0].token_id)
        return made


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "base", "qwen3", seed=3)


@pytest.fixture(scope="module")
def folders(checkpoint: Path) -> list[Path]:
    parent = checkpoint.parent
    return [
        make_adapter(parent / "inputs", checkpoint, 1, rank=3, targets=("o_proj", "down_proj")),
        make_adapter(parent / "all", checkpoint, 2, rank=5, targets=ALL_PROJECTIONS),
    ]


@contextmanager
def serving(checkpoint: Path, ranks: int, quantize: str = "none") -> Iterator[Served]:
    prepared = prepare_model(
        ModelOptions(
            checkpoint, torch.device("cpu"), "float32", 8, 1 << 22, 256, quantize=quantize, tensor_parallel=ranks
        )
    )
    adapters = AdapterSet()
    storage = torch.zeros(prepared.storage_bytes, dtype=torch.uint8)
    runner = prepared.load(storage, progress=False, adapters=adapters)
    try:
        yield Served(runner, adapters)
    finally:
        runner.close()


@pytest.fixture(scope="module", params=[1, 2], ids=lambda ranks: f"{ranks} ranks")
def served(checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    with serving(checkpoint, request.param) as serves:
        yield serves


def test_adapters_are_added_and_removed_between_steps(served: Served, checkpoint: Path, folders: list[Path]) -> None:
    models = [merged_model(checkpoint, folder) for folder in (None, *folders)]
    wanted = [[greedy(model, prompt, TOKENS) for prompt in PROMPTS] for model in models]
    first, second = (served.add(folder) for folder in folders)
    assert served.answers([first, second, 0]) == [wanted[1][0], wanted[2][1], wanted[0][2]]
    served.remove(first)
    assert served.answers([second, 0, second]) == [wanted[2][0], wanted[0][1], wanted[2][2]]
    again = served.add(folders[0])
    assert again not in (first, second)
    assert served.answers([0, again, second]) == [wanted[0][0], wanted[1][1], wanted[2][2]]
    served.remove(second)
    assert served.answers([again] * 3) == wanted[1]
    served.remove(again)


def test_two_ranks_with_integer_weights_answer_as_one(checkpoint: Path, folders: list[Path]) -> None:
    answers = []
    for ranks in (1, 2):
        with serving(checkpoint, ranks, "int8") as serves:
            first, second = (serves.add(folder) for folder in folders)
            answers.append(serves.answers([first, second, first]))
    assert answers[0] == answers[1]


def test_rank_that_reads_another_file_refuses_and_later_adapters_are_right(
    checkpoint: Path, folders: list[Path]
) -> None:
    with serving(checkpoint, 2) as serves:
        with pytest.raises(ModelError, match=r"rank 1: adapter 'inputs' changed while it was read"):
            serves.add(folders[0], digest="of another file")
        number = serves.add(folders[1])
        model = merged_model(checkpoint, folders[1])
        assert serves.answers([number] * 3) == [greedy(model, prompt, TOKENS) for prompt in PROMPTS]


def test_file_that_changes_while_it_is_read_is_refused(
    checkpoint: Path, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = iter(("before", "after"))
    monkeypatch.setattr(files, "adapter_digest", lambda folder: next(digests))
    with pytest.raises(ModelError, match="changed while it was read"):
        read_named("inputs", folders[0])


@pytest.mark.parametrize("ranks", [1, 2], ids=lambda ranks: f"{ranks} ranks")
@pytest.mark.parametrize("family", OTHER_SHAPES)
def test_other_families_equal_merged_weights(family: str, ranks: int, tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", family, seed=3)
    folder = make_adapter(tmp_path / "all", base, 2, rank=5, targets=OTHER_SHAPES[family])
    model = merged_model(base, folder)
    with serving(base, ranks) as serves:
        number = serves.add(folder)
        assert serves.answers([number] * 3) == [greedy(model, prompt, TOKENS) for prompt in PROMPTS]
