"""The gap that clients see when a worker dies, and the plan of faults of a seed."""

import os
import random
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import pytest

from baton.lab.chaos.campaign import make_injection
from baton.lab.chaos.checker import Injected, Pause, gaps_at, pause_around
from baton.lab.chaos.disk.counts import TierCounts
from baton.lab.chaos.disk.injections import (
    DISK_FAULTS,
    DiskFails,
    FilesDamaged,
    FolderTaken,
    KilledWriting,
    OtherModelPut,
    TierScene,
)
from baton.lab.chaos.disk.shim import DiskShim
from baton.lab.chaos.faults import ALL_ROUTERS, WORKERS, Fault, FaultKind, plan_faults
from baton.lab.chaos.history import Behaviour, ObservedAttempt, StreamHistory, StreamPiece
from baton.lab.chaos.hosts.injections import HOST_KINDS
from baton.lab.chaos.injection import (
    CutConnections,
    FlippedOnTheWay,
    Flushed,
    NotMade,
    Ruled,
    Scene,
    Signalled,
    Stopped,
    injection_of,
)
from baton.lab.chaos.stack import ChaosStack
from baton.lab.chaos.watch import life_of


def test_gap_is_the_pause_around_the_fault() -> None:
    times = [1.0, 1.1, 1.2, 3.0, 3.1]
    assert pause_around(times, 1.25) == Pause(1.2, 3.0)
    assert pause_around(times, 1.15) == Pause(1.2, 3.0), "what was on its way still came"
    assert pause_around(times, 0.5) is None
    assert pause_around(times, 3.2) is None


def stream(number: int, *attempts: ObservedAttempt) -> StreamHistory:
    pieces = [StreamPiece(at_s, 0, offset, (7,), "x") for offset, at_s in enumerate((1.0, 2.0, 4.5, 5.0))]
    return StreamHistory(number, "greedy 0", Behaviour.READS, "id", 0.5, 1, pieces, attempts=list(attempts))


def test_only_streams_that_lost_that_worker_count() -> None:
    killed = Injected(Fault(FaultKind.KILL, "decode-1"), 2.1, 2.2, "pid 7 is gone")
    unproven = Injected(Fault(FaultKind.KILL, "decode-1"), 2.1, 2.2, None)
    lost = stream(
        1, ObservedAttempt("prefill-0", "decode-1", "WORKER_LOST"), ObservedAttempt("prefill-0", "decode-0", "")
    )
    elsewhere, unharmed = (
        stream(2, ObservedAttempt("prefill-0", "decode-0", "")),
        stream(3, ObservedAttempt("", "decode-1", "")),
    )
    found = gaps_at([unproven, killed], [lost, elsewhere, unharmed], frozenset({FaultKind.KILL}))
    assert [(gap.stream, gap.fault, gap.seconds) for gap in found] == [(1, 1, 2.5)]
    assert gaps_at([killed], [lost], frozenset({FaultKind.STOP})) == []


def test_stream_whose_worker_was_on_a_lost_host_counts() -> None:
    on_host = frozenset({"prefill-1", "decode-1"})
    host = Injected(Fault(FaultKind.HOST_LOST, "host-2", on_host=on_host), 2.1, 2.2, "3 processes are gone")
    lost = stream(
        1, ObservedAttempt("prefill-0", "decode-1", "WORKER_LOST"), ObservedAttempt("prefill-0", "decode-0", "")
    )
    [gap] = gaps_at([host], [lost, stream(2, ObservedAttempt("", "decode-0", ""))], frozenset({FaultKind.HOST_LOST}))
    assert (gap.stream, gap.seconds) == (1, 2.5)


def test_gap_names_concurrent_faults() -> None:
    killed = Injected(Fault(FaultKind.KILL, "decode-1"), 2.1, 2.2, "pid 7 is gone")
    lasting = Injected(Fault(FaultKind.STOP, "decode-0"), 1.2, 2.4, "stopped")
    later = Injected(Fault(FaultKind.FLUSH, "redis"), 3.0, 3.0, "flushed")
    before = Injected(Fault(FaultKind.CUT, "router-0"), 1.5, 1.5, "1 connection")
    after = Injected(Fault(FaultKind.KILL, "decode-0"), 4.6, 5.0, "pid 8 is gone")
    unproven = Injected(Fault(FaultKind.KILL, "prefill-0"), 3.0, 3.0, None)
    lost = stream(
        1, ObservedAttempt("prefill-0", "decode-1", "WORKER_LOST"), ObservedAttempt("prefill-0", "decode-0", "")
    )
    [gap] = gaps_at([killed, lasting, later, before, after, unproven], [lost], frozenset({FaultKind.KILL}))[:1]
    assert gap.meanwhile == ("SIGSTOP decode-0", "FLUSHALL redis")


def test_seed_makes_the_same_faults_and_every_kind_comes() -> None:
    plan = plan_faults(4, 300)
    assert plan == plan_faults(4, 300) != plan_faults(5, 300)
    kinds = Counter(each.fault.kind for each in plan)
    assert set(kinds) == set(FaultKind) - HOST_KINDS
    killed = {each.fault.target for each in plan if each.fault.kind is FaultKind.KILL}
    assert killed == {*WORKERS, "router-0", "router-1", "redis"}
    assert not {each.fault.kind for each in plan_faults(4, 300, without=frozenset({FaultKind.CLOCK}))} & {
        FaultKind.CLOCK
    }


def test_plan_for_four_routers_hits_each_of_them() -> None:
    plan = [each.fault for each in plan_faults(4, 300, routers=4)]
    assert {each.target for each in plan if each.kind is FaultKind.KILL} == {*WORKERS, *ALL_ROUTERS, "redis"}
    assert {each.source for each in plan if each.kind is FaultKind.PARTITION} >= set(ALL_ROUTERS)


def test_disturbed_link_exists() -> None:
    for planned in plan_faults(9, 300):
        source, target = planned.fault.source, planned.fault.target
        assert source != target or planned.fault.kind is FaultKind.CLOCK
        if source.startswith("decode"):
            assert target.startswith("prefill") or target == "redis"


def test_every_fault_of_a_plan_is_an_injection_on_a_stack(tmp_path: Path) -> None:
    stack = ChaosStack(tmp_path, tmp_path, None)
    own = life_of(os.getpid())
    made = {}
    shim = DiskShim(tmp_path / "disk.so", tmp_path / "disk.page", tmp_path)
    scene = Scene(stack, None, random.Random(1), tier=TierScene(tmp_path, shim, TierCounts()))
    with patch.object(stack, "life", lambda name: own):
        for planned in plan_faults(1, 400, without=frozenset({FaultKind.CLOCK})):
            made[planned.fault.kind] = type(make_injection(planned.fault, scene))
    assert made == {
        FaultKind.KILL: Signalled,
        FaultKind.STOP: Stopped,
        FaultKind.RESTART: Signalled,
        FaultKind.CUT: CutConnections,
        FaultKind.PARTITION: Ruled,
        FaultKind.ONE_WAY: Ruled,
        FaultKind.DELAY: Ruled,
        FaultKind.BIT_FLIP: FlippedOnTheWay,
        FaultKind.FLUSH: Flushed,
        **dict.fromkeys(DISK_FAULTS, DiskFails),
        FaultKind.KILL_WRITING: KilledWriting,
        FaultKind.FILE_FLIP: FilesDamaged,
        FaultKind.FILE_CUT: FilesDamaged,
        FaultKind.FILE_GARBAGE: FilesDamaged,
        FaultKind.OTHER_MODEL: OtherModelPut,
        FaultKind.FOLDER_TAKEN: FolderTaken,
    }
    shim.close()


def test_missing_process_cannot_be_killed(tmp_path: Path) -> None:
    with pytest.raises(NotMade, match="not running"):
        injection_of(
            Fault(FaultKind.KILL, "decode-0"), Scene(ChaosStack(tmp_path, tmp_path, None), None, random.Random(1))
        )
