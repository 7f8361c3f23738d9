"""NCCL between two GPUs, by the code that gloo runs elsewhere. One GPU will not do: NCCL refuses two ranks on it.

A group of one rank is all that one GPU can have: it shows that the library is there, starts with our environment, takes
part in graphs and can be aborted.
"""

import threading
from pathlib import Path

import pytest
import torch

from baton.engine.parallel.collectives import Collectives
from baton.engine.parallel.shard import ALONE
from baton.engine.runner.cuda_graphs import GraphRecorder
from baton.kvtransfer.group_messages import GroupSender, GroupTransport, MessageLayout, blocks_per_message
from baton.kvtransfer.process_group import (
    READER,
    SOURCE,
    GroupOptions,
    GroupStore,
    LocalKeyValues,
    ProcessGroup,
    prepare_environment,
)
from baton.kvtransfer.slices import PoolShape
from baton.kvtransfer.transport import BlockPair
from tests.gpu.device import CUDA, needs_gpu

needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
SHAPE = PoolShape(num_blocks=64, block_bytes=1 << 20, rows=16)
TIMEOUT_S = 30.0


@needs_gpu
def test_sums_of_one_rank_are_part_of_a_graph_and_it_can_be_aborted(tmp_path: Path) -> None:
    prepare_environment("lo", TIMEOUT_S)
    torch.cuda.set_device(CUDA)
    group = Collectives(ALONE, tmp_path / "meeting", CUDA)
    numbers = torch.arange(4096.0, device=CUDA)
    assert group.sum(numbers.clone()).equal(numbers)  # the first makes the communicator
    replay, summed = GraphRecorder().record(lambda: group.sum(numbers * 2))
    numbers.fill_(3.0)
    replay()
    assert (summed == 6.0).all()
    aborting = threading.Thread(target=group.abort, daemon=True)
    aborting.start()
    aborting.join(TIMEOUT_S)
    assert not aborting.is_alive(), "a group that is aborted waits for something"
    assert (numbers + 1).sum().item() == 4 * 4096  # the device still works


@needs_two_gpus
def test_blocks_are_copied_bit_for_bit_between_two_gpus() -> None:
    prepare_environment("lo", TIMEOUT_S)
    values, groups = LocalKeyValues(), {}

    def meet(rank: int) -> None:
        options = GroupOptions("nccl", "lo", torch.device("cuda", rank), TIMEOUT_S)
        torch.cuda.set_device(rank)
        groups[rank] = ProcessGroup(GroupStore(values, TIMEOUT_S), rank, options)

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in (SOURCE, READER)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    layout = MessageLayout(SHAPE, SHAPE, blocks_per_message(SHAPE))
    source = torch.randint(0, 256, (SHAPE.part_bytes,), dtype=torch.uint8, device="cuda:0")
    own = torch.zeros(SHAPE.part_bytes, dtype=torch.uint8, device="cuda:1")
    broken: list[BaseException] = []
    sender = GroupSender(groups[SOURCE], source, layout, broken.append)

    class Control:
        def send(self, first_sequence: int, transfer_id: bytes, blocks: list[int]) -> None:
            sender.submit(first_sequence, blocks)

        def probe(self, first_sequence: int, messages: int) -> None:
            sender.probe(first_sequence, messages)

    transport = GroupTransport("nccl", groups[READER], Control(), own, layout, lambda: None)  # type: ignore[arg-type]
    assert transport.measure(64 << 20).gb_per_s > 0
    transport.copy(b"", [BlockPair(block, block, 63 - block) for block in range(64)])
    assert own.view(64, -1).flip(0).cpu().equal(source.view(64, -1).cpu())
    transport.close()
    sender.close()
    assert not broken
