"""NCCL between two GPUs, by the code that gloo runs elsewhere. One GPU will not do: NCCL refuses two ranks on it."""

import threading

import pytest
import torch

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

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
SHAPE = PoolShape(num_blocks=64, block_bytes=1 << 20, rows=16)
TIMEOUT_S = 30.0


def test_blocks_come_bit_for_bit_between_two_gpus() -> None:
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
