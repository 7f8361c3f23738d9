"""Recorded decode steps: the same answers as computed ones."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from baton.engine.kv_cache.swap_space import SwapSpace
from baton.engine.load import load_model
from baton.engine.models.batch import Model
from baton.engine.request import Chunk, Plan, Request, Sample
from baton.engine.runner import runner as runners
from baton.engine.runner.cuda_graphs import DECODE_PRIORITY, GraphRecorder, GraphSizes, RecordedSteps, why_not_recorded
from baton.engine.runner.engine import Engine
from baton.engine.runner.runner import Runner
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequences import TokenMade
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.encoders import make_encoder
from tests.fixtures.host_recorder import HostRecorder
from tests.fixtures.paged import CPU, PagedModel, random_prompt

BLOCK, BLOCKS, FEW = 8, 40, 12
GREEDY = SamplingParams(max_tokens=20)
SAMPLED = replace(GREEDY, temperature=0.9, top_k=40, top_p=0.95, seed=3)
REQUESTS = [
    *(Request(number, tuple(random_prompt(7 + 5 * number)), GREEDY, ()) for number in range(3)),
    Request(3, tuple(random_prompt(30)), replace(SAMPLED, n=3), ()),
    *(Request(number, tuple(random_prompt(3 * number)), replace(SAMPLED, max_tokens=number), ()) for number in (4, 5)),
]


@pytest.fixture(scope="module", params=["llama", "mistral", "gemma3_text"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("graphed"), request.param)


def recorded(paged: PagedModel, most: GraphSizes) -> RecordedSteps:
    return RecordedSteps(paged.model, paged.kv, HostRecorder(), most, paged.layout.groups.count)


def answers(checkpoint: Path, blocks: int, graphs: GraphSizes | None, overlapped: bool = False) -> tuple[object, int]:
    """Tokens of every choice, and how many steps were replayed."""
    paged, recorder = PagedModel(checkpoint, BLOCK, blocks), HostRecorder()
    runner = paged.runner
    if graphs is not None:
        runner.record(graphs, recorder)
    recorder.replays = 0
    scheduler = Scheduler(paged.pool(blocks), BLOCK, 32, max_sequences=8, swap=SwapSpace(0))
    runner.may_launch_ahead = overlapped
    engine = Engine(runner, scheduler)
    for request in REQUESTS:
        scheduler.add(request)
    made: dict[tuple[int, int], list[int]] = {}
    while (outcomes := engine.step()) is not None:
        for outcome in outcomes:
            if isinstance(outcome, TokenMade):
                made.setdefault((outcome.request_id, outcome.choice), []).append(outcome.drawn.token_id)
    assert (scheduler.counters.preemptions > 0) == (blocks < BLOCKS)
    return made, recorder.replays


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[int, object]:
    """Answers of the model itself, by the blocks of its pool."""
    return {blocks: answers(checkpoint, blocks, None)[0] for blocks in (BLOCKS, FEW)}


@pytest.mark.parametrize("blocks", [BLOCKS, FEW], ids=["roomy", "preempting"])
@pytest.mark.parametrize("overlapped", [False, True])
def test_answers_equal_the_unrecorded_model(
    checkpoint: Path, expected: dict[int, object], blocks: int, overlapped: bool
) -> None:
    found, replays = answers(checkpoint, blocks, GraphSizes(8, 8), overlapped)
    assert found == expected[blocks]
    assert replays > 15


@pytest.mark.parametrize("overlapped", [False, True])
def test_steps_larger_than_recorded_are_computed_without_a_graph(
    checkpoint: Path, expected: dict[int, object], overlapped: bool
) -> None:
    assert answers(checkpoint, BLOCKS, GraphSizes(rows=3, columns=2), overlapped)[0] == expected[BLOCKS]
    assert answers(checkpoint, BLOCKS, GraphSizes(rows=3, columns=8), overlapped)[0] == expected[BLOCKS]


@pytest.mark.parametrize("follows", [0, 2, 5])
def test_recorded_step_may_follow_any_row_of_an_unrecorded_one(checkpoint: Path, follows: int) -> None:
    """A batch that shrinks below the largest recorded one."""
    drawn = []
    for graphs in (None, GraphSizes(rows=2, columns=2)):
        paged, recorder = PagedModel(checkpoint, BLOCK, BLOCKS), HostRecorder()
        paged.kv.data.zero_()
        runner = paged.runner
        if graphs is not None:
            runner.record(graphs, recorder)
        recorder.replays, runner.may_launch_ahead = 0, True
        tables = [paged.blocks(BLOCK) for _ in range(6)]
        answers = [Chunk(row, [7 + 11 * row], 3, tables[row], (Sample(0, GREEDY),)) for row in range(6)]
        large = runner.launch(Plan(tuple(answers)))
        following = Chunk(follows, [0], 4, tables[follows], (Sample(0, GREEDY),), follows=follows)
        drawn.append(runner.launch(Plan((following,)), large).results()[0].drawn[0].token_id)
        assert recorder.replays == (graphs is not None and follows < 2)
    assert drawn[0] == drawn[1]


class LeadersPart:
    """A model of which only the layers are recorded, as a rank's is."""

    def __init__(self, whole: Model) -> None:
        self.config, self.dtype, self.device = whole.config, whole.dtype, whole.device
        self.hidden, self.logits = whole.hidden, whole.logits


def test_where_only_layers_are_recorded_tokens_are_drawn_on_the_device_too(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paged, recorder = PagedModel(checkpoint, BLOCK, BLOCKS), HostRecorder()
    runner = Runner(LeadersPart(paged.model), paged.layout, paged.kv)
    table = paged.blocks(2 * BLOCK)
    plans = [Plan((Chunk(0, random_prompt(9), 0, table, (Sample(0, GREEDY),)),))]
    plans += [Plan((Chunk(0, [5], 9 + step, table, (Sample(0, GREEDY),)),)) for step in range(3)]
    expected = [runner.run(plan) for plan in plans]
    runner.record(GraphSizes(2, 4), recorder)
    recorder.replays, runner.may_launch_ahead = 0, True
    monkeypatch.setattr(runners, "sample_each", None)  # which waits for the device
    found = [runner.run(plan) for plan in plans]
    assert [[each.drawn[0].token_id for each in step] for step in found] == [
        [each.drawn[0].token_id for each in step] for step in expected
    ]
    assert recorder.replays == 3


def test_runner_says_whether_it_replays_steps(checkpoint: Path) -> None:
    runner = PagedModel(checkpoint, BLOCK, BLOCKS).runner
    assert not runner.replays_steps
    runner.record(GraphSizes(2, 4), HostRecorder())
    assert runner.replays_steps


def test_recording_writes_nothing_to_the_pool(checkpoint: Path) -> None:
    paged = PagedModel(checkpoint, BLOCK, 4)
    recorded(paged, GraphSizes(4, 4))
    assert (paged.kv.data.view(torch.uint8) == 0xFF).all()


@pytest.mark.parametrize(("rows", "sizes"), [(1, [1]), (5, [1, 2, 4, 5]), (24, [1, 2, 4, 8, 16, 24])])
def test_sizes_end_with_the_largest_batch_there_may_be(checkpoint: Path, rows: int, sizes: list[int]) -> None:
    paged = PagedModel(checkpoint, BLOCK, 4)
    assert recorded(paged, GraphSizes(rows, 1)).sizes == sizes


def test_more_rows_than_any_size_are_not_recorded_twice(checkpoint: Path) -> None:
    paged = PagedModel(checkpoint, BLOCK, 4)
    sizes = recorded(paged, GraphSizes(1000, 1)).sizes
    assert (sizes[-1], len(sizes)) == (256, 35)


def test_models_with_host_chosen_experts_are_not_recorded(tmp_path: Path) -> None:
    model = load_model(make_checkpoint(tmp_path, "mixtral"), torch.float32, CPU, progress=False)
    assert why_not_recorded(model) == "its experts are chosen on the host"


def test_models_with_a_classification_head_are_not_recorded(tmp_path: Path) -> None:
    model = load_model(make_encoder(tmp_path, "llama", labels=1), torch.float32, CPU, progress=False)
    assert why_not_recorded(model) == "llama computes vectors, not answers"


def test_all_graphs_are_recorded_on_one_stream_of_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a worker that begins as prefill, whose current stream has no priority."""
    streams: list[Any] = []
    cuda = MagicMock()
    cuda.Stream.side_effect = lambda **options: MagicMock(**options)
    cuda.current_stream.return_value.priority = 0

    def recording(graph: object, stream: object, **options: object) -> nullcontext[None]:
        streams.append(stream)
        return nullcontext()

    cuda.graph.side_effect = recording
    monkeypatch.setattr(torch, "cuda", cuda)
    recorder = GraphRecorder()
    for _ in range(3):
        recorder.record(lambda: torch.zeros(1))
    assert len(streams) == 3
    assert len(set(map(id, streams))) == 1
    assert streams[0].priority == DECODE_PRIORITY < 0


def test_step_with_drafts_is_computed(checkpoint: Path) -> None:
    """A graph's attention stores a row's keys where it reads them: no other row of its launch may need them."""
    paged = PagedModel(checkpoint, BLOCK, BLOCKS)
    steps = recorded(paged, GraphSizes(4, 4))
    table = paged.blocks(BLOCK)
    newest = Chunk(0, [5], 3, table)
    assert steps.find([newest]) is not None
    assert steps.find([newest, Chunk(0, [6], 4, table, is_draft=True)]) is None
