"""Checks of the GPU tests that need no GPU: their tolerances, and the processes that run them."""

import functools
import math
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from baton.engine.request import Chunk, Plan
from baton.kernels import attention, reference
from baton.kernels.types import KvLayer, Scoring
from baton.lab.benchmarks.gpu import __main__ as gpu
from baton.lab.benchmarks.gpu import suite
from baton.lab.benchmarks.gpu.row_processes import ALL_ROWS
from baton.launch.paths import ROOT
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.ended import has_ended
from tests.fixtures.paged import PagedModel, random_prompt
from tests.gpu.conftest import pytest_collection_modifyitems
from tests.gpu.device import ATTENTION_ROUNDING, apart

BLOCK, PROMPT = 16, random_prompt(300)


def tiled(
    query: torch.Tensor, kv: KvLayer, block_ids: torch.Tensor, start: int, scoring: Scoring, tile: int, seen: int
) -> torch.Tensor:
    """Attention as a kernel adds it up, `tile` keys at a time, with weights in bf16. `seen`: keys that a token sees of
    those after it, 0 where it is right."""
    tokens, end = len(query), start + len(query)
    own = kv.data.permute(1, 2, 0, 3, 4).index_select(2, block_ids).flatten(2, 3)[:, :, :end].float()
    keys, values = own.repeat_interleave(query.shape[1] // own.shape[1], 1)
    scores = (query.transpose(0, 1).float() @ keys.transpose(1, 2)) * scoring.scale
    visible = torch.ones(tokens, end, dtype=torch.bool).tril(start + seen)
    scores = scores.masked_fill(~visible, -math.inf)
    highest, total, sums = torch.full(scores.shape[:2], -1e30), torch.zeros(scores.shape[:2]), torch.tensor(0.0)
    for begin in range(0, end, tile):
        part = scores[..., begin : begin + tile]
        higher = torch.maximum(highest, part.amax(-1))
        weights, kept = (part - higher[..., None]).exp(), (highest - higher).exp()
        total = total * kept + weights.sum(-1)
        sums = sums * kept[..., None] + weights.bfloat16().float() @ values[:, begin : begin + tile]
        highest = higher
    return (sums / total[..., None]).transpose(0, 1).to(query.dtype)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("bounds"), "llama")


def kv_of_prompt(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tile: int, seen: int = 0) -> torch.Tensor:
    monkeypatch.setattr(reference, "paged_prefill", functools.partial(tiled, tile=tile, seen=seen))
    monkeypatch.setattr(attention, "pick", lambda spelled, *_: spelled)
    paged = PagedModel(checkpoint, BLOCK, 32, torch.bfloat16)
    table = paged.blocks(len(PROMPT))
    paged.runner.run(Plan((Chunk(0, PROMPT, 0, table),)))
    return torch.nan_to_num(paged.kv.data[table], nan=0.0)  # slots after the prompt


def test_attentions_in_another_order_are_as_close_as_they_are_asked_to_be(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = (kv_of_prompt(checkpoint, monkeypatch, tile) for tile in (64, 512))
    assert 0 < apart(ours, theirs) < ATTENTION_ROUNDING


def test_mask_that_shows_one_token_too_many_is_not(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = (kv_of_prompt(checkpoint, monkeypatch, 64, seen) for seen in (0, 1))
    assert apart(wrong, right) > ATTENTION_ROUNDING


def test_numbers_that_are_none_are_never_close() -> None:
    assert not apart(torch.tensor([1.0, math.nan]), torch.ones(2)) < ATTENTION_ROUNDING


def test_every_test_of_a_gpu_is_in_one_of_the_processes() -> None:
    files = {path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert sorted(suite.ALL_FILES) == sorted(files)


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_parts_share_out_all_tests(parts: int) -> None:
    shared: list[int] = []
    for part in range(1, parts + 1):
        items: list[Any] = list(range(7))
        options = {"--part": f"{part}/{parts}", "--after": ""}
        pytest_collection_modifyitems(Mock(getoption=options.__getitem__), items)
        shared += items
    assert sorted(shared) == list(range(7))


TESTS = """
import os, subprocess, threading
import pytest, torch

def lost():
    raise RuntimeError("an illegal memory access was encountered")

def test_first():
    pass

def test_breaks(monkeypatch):
    torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, lost

@pytest.mark.parametrize("number", [1, 2])
def test_behind(number):
    assert number == 1, "the one that fails by itself"

def test_dies():
    os._exit(7)

def test_last():
    pass
"""
HANGS = """
def test_hangs():
    child = subprocess.Popen(["sleep", "600"])
    open("pid", "w").write(str(child.pid))
    threading.Event().wait()
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Make a checkout with the tests above in a file of their own."""
    folder = tmp_path / "tests" / "gpu"
    folder.mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "gpu" / "conftest.py", folder)
    (folder / suite.ALONE[0]).write_text(TESTS + HANGS)
    return tmp_path


def test_test_that_ends_its_process_is_named_and_costs_no_other(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(suite, "EACH_ALONE_S", 600.0)  # four processes that import torch
    monkeypatch.setattr(suite, "TEST_SHARE", 0.005)
    (outcome,) = suite.run_tests(checkout, suite.ALONE[:1], checkout, time.monotonic() + 600)
    ids = [f"tests/gpu/{suite.ALONE[0]}::test_{name}" for name in ("breaks", "dies", "hangs")]
    assert outcome.code != 0
    assert outcome.summary == "; ".join(f"ended by {test}" for test in ids)
    assert outcome.summary in capsys.readouterr().out
    log = (checkout / "tests-1.txt").read_text()
    for name in ("first", "behind[1]", "last"):
        assert f"::test_{name} PASSED" in log
    assert "the one that fails by itself" in log
    assert "an illegal memory access" in log
    assert re.search(r"line \d+ in test_hangs", log)
    assert not list(checkout.glob("*.running"))


def test_test_that_hangs_ends_with_the_processes_that_it_started(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, note = suite.start, checkout / "pid"

    def start(root: Path, part: suite.SuitePart) -> "subprocess.Popen[bytes]":
        process = begin(root, part)
        while not note.exists() or not note.read_text():
            assert process.poll() is None
        return process

    monkeypatch.setattr(suite, "start", start)
    (checkout / "tests" / "gpu" / suite.ALONE[0]).write_text(TESTS[: TESTS.index("def test_first")] + HANGS)
    (outcome,) = suite.run_tests(checkout, suite.ALONE[:1], checkout, time.monotonic())
    assert outcome.code == suite.TIMED_OUT
    assert outcome.summary == f"ended by tests/gpu/{suite.ALONE[0]}::test_hangs"
    end = time.monotonic() + 30
    while not has_ended(int(note.read_text())):
        assert time.monotonic() < end, "a process that the test started is still there"


def test_files_and_rows_are_chosen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[tuple[set[str], set[str]]] = []
    monkeypatch.setattr(gpu, "measure", lambda files, rows, out, dry: asked.append((files, rows)))
    gpu.main(["--tests", "tests/gpu/test_nccl.py,test_cuda_ipc.py", "--no-rows"])
    gpu.main(["--no-tests", "--rows", "pages"])
    gpu.main([])
    everything = (set(suite.ALL_FILES), set(ALL_ROWS))
    assert asked == [({"test_nccl.py", "test_cuda_ipc.py"}, set()), (set(), {"pages"}), everything]
    with pytest.raises(SystemExit):
        gpu.main(["--tests", "test_ipc.py"])
    assert "no test file is called test_ipc.py" in capsys.readouterr().err
