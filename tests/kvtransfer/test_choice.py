"""Which way KV goes between two pools, and why not a faster one."""

from dataclasses import replace

import pytest

from baton.kvtransfer.description import (
    DeviceMemoryHandle,
    PoolDescription,
    SharedMemoryHandle,
    check_compatible,
    possible_ways,
)
from baton.kvtransfer.transport import PairingRefused, PeerUnreachable

MINE = PoolDescription(b"model", 4096, 10, "host", b"mine")
MAPPED = replace(MINE, pool_id=b"theirs", shared_memory=SharedMemoryHandle(1, 2, 3, 40960))
ON_GPU = replace(MINE, pool_id=b"theirs", device_memory=(DeviceMemoryHandle(b"h" * 64, 0, 40960),))


def test_fastest_transport_is_first_and_grpc_last() -> None:
    both = replace(MAPPED, group_backend="gloo")
    ways = possible_ways(replace(MINE, group_backend="gloo"), both, "cpu", "auto")
    assert ways.possible == ("shared_memory", "gloo", "grpc")
    assert possible_ways(MINE, ON_GPU, "cuda", "auto").possible == ("cuda_ipc", "grpc")


def test_another_host_leaves_a_group_where_both_offer_one() -> None:
    elsewhere = replace(ON_GPU, host_id="other", group_backend="nccl")
    assert possible_ways(replace(MINE, group_backend="nccl"), elsewhere, "cuda", "auto").possible == ("nccl", "grpc")
    ways = possible_ways(MINE, elsewhere, "cuda", "auto")
    assert ways.possible == ("grpc",)
    assert [reason.partition(":")[0] for reason in ways.reasons] == [
        "shared_memory",
        "cuda_ipc",
        "nixl",
        "nccl",
        "gloo",
        "tcp",
    ]


def test_remote_host_pools_in_host_memory_use_tcp_if_a_port_is_known() -> None:
    elsewhere = replace(MAPPED, host_id="other", tcp_port=4000)
    assert possible_ways(MINE, elsewhere, "cpu", "auto").possible == ("tcp", "grpc")
    assert possible_ways(MINE, elsewhere, "cuda", "auto").possible == ("grpc",)
    assert possible_ways(MINE, elsewhere, "cpu", "tcp").possible == ("tcp",)


@pytest.mark.parametrize("choice", ["shared_memory", "cuda_ipc", "nixl", "nccl", "gloo", "tcp"])
def test_demanded_transport_is_rejected_rather_than_replaced(choice: str) -> None:
    with pytest.raises(PeerUnreachable):
        possible_ways(MINE, replace(MINE, pool_id=b"theirs"), "cpu", choice)  # type: ignore[arg-type]


def test_grpc_can_be_demanded_of_anybody() -> None:
    assert possible_ways(MINE, MAPPED, "cpu", "grpc").possible == ("grpc",)


def test_every_part_of_a_pool_must_be_open_to_us() -> None:
    cut = replace(ON_GPU, parts=2)
    assert possible_ways(MINE, cut, "cuda", "auto").possible == ("grpc",)
    assert (
        possible_ways(MINE, replace(cut, device_memory=cut.device_memory * 2), "cuda", "auto").possible[0] == "cuda_ipc"
    )


@pytest.mark.parametrize(
    ("theirs", "field"),
    [
        (replace(MINE, parts=2, rows=3), "rows"),
        (replace(MINE, parts=3, rows=8), "parts"),
        (replace(MINE, device_memory=(DeviceMemoryHandle(b"", 0, 1),)), "device_memory"),
    ],
)
def test_pools_without_a_common_cut_are_not_paired(theirs: PoolDescription, field: str) -> None:
    with pytest.raises(PairingRefused) as refused:
        check_compatible(replace(MINE, rows=8), theirs)
    assert refused.value.field == field
