"""How the hand-over benchmark computes stages from the times that workers wrote."""

import json
from pathlib import Path

import pytest

from baton.lab.benchmarks.transfer.hand_over import stages_of
from baton.lab.benchmarks.transfer.marked_worker import StageMarks

PREFILL = [("step", 1.0, 1.5), ("advance", 1.501, 1.502), ("step", 1.6, 2.0), ("advance", 2.001, 2.002)]
DECODE = [
    ("step", 0.0, 0.5),  # of an earlier answer
    ("copy", 1.503, 1.603),
    ("copy", 2.004, 2.104),
    ("confirm", 2.105, 2.107),
    ("activate", 2.107, 2.1071),
    ("step", 2.110, 2.2),
    ("step", 2.2, 2.3),
]


@pytest.fixture
def marks(tmp_path: Path) -> tuple[StageMarks, StageMarks]:
    for name, lines in (("prefill", PREFILL), ("decode", DECODE)):
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return StageMarks(tmp_path / "prefill"), StageMarks(tmp_path / "decode")


def test_stages_add_up_to_the_time_between_the_last_chunk_and_the_first_step(
    marks: tuple[StageMarks, StageMarks],
) -> None:
    stages, _ = stages_of(*marks, since=0.9)
    parts = (stages.news, stages.way, stages.copy, stages.confirm, stages.activate)
    assert parts == pytest.approx((1.0, 3.0, 101.0, 2.0, 3.0))
    assert stages.total == pytest.approx(sum(parts)) == pytest.approx(110.0)


def test_copy_before_the_end_of_the_last_chunk_is_hidden(marks: tuple[StageMarks, StageMarks]) -> None:
    _, hidden = stages_of(*marks, since=0.9)
    assert hidden == pytest.approx(0.5)
