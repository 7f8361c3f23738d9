"""A rank dies while a GPU's step waits for it: what the step makes without its part goes nowhere."""

import os
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.models.decoder import DecoderModel
from baton.engine.parallel import other_ranks, wire
from baton.engine.parallel.collectives import Collectives, RankLost
from baton.engine.parallel.model import ParallelModel, parallel_part
from baton.engine.parallel.other_ranks import OtherRanks
from baton.engine.parallel.wire import RankStart
from baton.engine.request import Request
from baton.engine.runner.engine import Engine
from baton.engine.runner.runner import Runner
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.scheduler import Scheduler
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import PagedModel, random_prompt

BLOCK, BLOCKS = 16, 8


class RankInPart:
    """A process of which only the connection is there."""

    pid, returncode = 7, -9

    def __init__(self, command: Sequence[str], pass_fds: Sequence[int], **others: Any) -> None:
        self.connection = socket.socket(fileno=os.dup(pass_fds[0]))
        wire.send(self.connection, wire.READY, b"")

    def wait(self, timeout_s: float) -> None:
        """It has ended."""


class OnStreams:
    """Exchanges as NCCL's: `abort` ends those that wait, with the numbers of this rank alone."""

    def __init__(self) -> None:
        self.dying: RankInPart | None = None
        self._aborted = threading.Event()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def from_leader(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def side_by_side(self, part: torch.Tensor, width: int) -> torch.Tensor:
        """The last exchange of a step: the leader sends the other ranks nothing any more."""
        if self.dying is not None:
            self.dying.connection.close()
            assert self._aborted.wait(60.0)
        return part

    def abort(self) -> None:
        self._aborted.set()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtherRanks]:
    in_part = SimpleNamespace(Popen=RankInPart, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(other_ranks, "subprocess", in_part)
    made = OtherRanks(RankStart("folder", "cpu", "float32", "none", 2, None, "entry", 0))
    made.load(lambda meeting: None)
    yield made
    made.close()


def test_step_that_ends_without_the_part_of_a_lost_rank_makes_no_tokens(ranks: OtherRanks, tmp_path: Path) -> None:
    paged, streams = PagedModel(make_checkpoint(tmp_path, "llama"), BLOCK, BLOCKS), OnStreams()
    collectives = cast("Collectives", streams)
    assert isinstance(paged.model, DecoderModel)
    model = ParallelModel(parallel_part(paged.model, collectives), collectives, ranks.announce_logits)
    ranks.abort = streams.abort
    scheduler = Scheduler(BlockPool(BLOCKS), BLOCK, 64, max_sequences=8)
    engine = Engine(Runner(model, paged.layout, paged.kv, other_ranks=ranks), scheduler)
    scheduler.add(Request(0, tuple(random_prompt(9)), SamplingParams(max_tokens=40), ()))
    assert engine.step(), "the first token"
    is_reported = threading.Event()
    ranks.watch(lambda lost: is_reported.set())
    [rank] = ranks.processes
    streams.dying = cast("RankInPart", rank)
    with pytest.raises(RankLost, match="may be incomplete"):
        engine.step()
    assert is_reported.wait(60.0)
