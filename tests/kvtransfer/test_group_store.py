"""The store over which two ranks meet."""

import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C import _distributed_c10d

from baton.kvtransfer.process_group import (
    READER,
    SOURCE,
    GroupOptions,
    GroupStore,
    LocalKeyValues,
    ProcessGroup,
    prepare_environment,
)
from baton.kvtransfer.transport import LinkBroken

GLOO = GroupOptions("gloo", "lo", torch.device("cpu"), timeout_s=10.0)


def test_wait_ends_when_the_key_is_set_at_its_bound_or_when_the_store_closes() -> None:
    values = LocalKeyValues()
    with pytest.raises(LinkBroken):
        values.get("a", 0.01)
    threading.Timer(0.01, values.set, ("a", b"1")).start()
    assert values.get("a", 10.0) == b"1"
    threading.Timer(0.01, values.close).start()
    with pytest.raises(LinkBroken):
        values.wait(["b"], 10.0)


def test_group_store_implements_torchs_store() -> None:
    store = GroupStore(LocalKeyValues(), 1.0)
    store.set("a", "text")
    assert (store.get("a"), store.check(["a"]), store.check(["a", "b"])) == (b"text", True, False)
    assert (store.add("n", 2), store.add("n", 3)) == (2, 5)
    store.wait(["a"], timedelta(seconds=1))
    assert (store.delete_key("a"), store.delete_key("a")) == (True, False)


def test_rank_without_its_peer_times_out() -> None:
    options = GroupOptions("gloo", "lo", torch.device("cpu"), timeout_s=0.05)
    with pytest.raises(LinkBroken, match="did not arrive within"):
        ProcessGroup(GroupStore(LocalKeyValues(), 0.05), SOURCE, options)


def test_missing_interface_is_named() -> None:
    options = GroupOptions("gloo", "nowhere0", torch.device("cpu"), timeout_s=1.0)
    with pytest.raises(LinkBroken, match="nowhere0"):
        ProcessGroup(GroupStore(LocalKeyValues(), 1.0), SOURCE, options)


def meet_both() -> dict[int, ProcessGroup]:
    values, groups = LocalKeyValues(), {}
    stores = {rank: GroupStore(values, 10.0) for rank in (SOURCE, READER)}

    def meet(rank: int) -> None:
        groups[rank] = ProcessGroup(stores[rank], rank, GLOO)

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return groups


def test_dropping_one_end_wakes_the_other() -> None:
    groups = meet_both()
    wait = groups[READER].receive(torch.zeros(8, dtype=torch.uint8), 0)
    threading.Timer(0.05, groups[SOURCE].close).start()
    with pytest.raises(LinkBroken, match="closed"):
        wait()
    groups[READER].close()
    with pytest.raises(LinkBroken, match="closed"):
        groups[READER].receive(torch.zeros(8, dtype=torch.uint8), 1)


def test_closing_a_group_ends_its_wait_despite_a_silent_peer() -> None:
    """The news of a dead peer may come by another way, and gloo may never hear of it."""
    groups = meet_both()
    wait = groups[READER].receive(torch.zeros(8, dtype=torch.uint8), 0)
    threading.Timer(0.05, groups[READER].close).start()
    started = time.monotonic()
    with pytest.raises(LinkBroken, match="closed"):
        wait()
    assert time.monotonic() - started < GLOO.timeout_s / 2
    groups[SOURCE].close()


def test_nccl_may_not_end_the_process() -> None:
    environment: dict[str, str] = {}
    prepare_environment("eth1", 5.0, environment)
    assert environment["NCCL_SOCKET_IFNAME"] == "=eth1"
    assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"


def test_group_of_a_pair_waits_for_no_peer_and_other_groups_are_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of a worker have groups by NCCL too."""
    made: list[Any] = []

    class Nccl:
        def __init__(self, store: object, rank: int, size: int, options: Any) -> None:
            made.append(options)

        @staticmethod
        def Options() -> Any:
            return SimpleNamespace(config=SimpleNamespace(blocking=None))

        def abort(self) -> None:
            pass

    monkeypatch.setattr(_distributed_c10d, "ProcessGroupNCCL", Nccl, raising=False)
    environment: dict[str, str] = {}
    prepare_environment("lo", 5.0, environment)
    options = GroupOptions("nccl", "lo", torch.device("cpu"), 5.0)
    ProcessGroup(GroupStore(LocalKeyValues(), 5.0), SOURCE, options).close()
    assert [each.config.blocking for each in made] == [0]
    assert "TORCH_NCCL_USE_COMM_NONBLOCKING" not in environment
