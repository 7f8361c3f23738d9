"""Faults come in order, always leave a process of each kind, and are retried if they found nothing to break."""

import asyncio
import random
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from baton.lab.chaos.campaign import TRIES, FaultCampaign, Unmade, never_made, too_few_proven
from baton.lab.chaos.checker import Injected
from baton.lab.chaos.faults import Fault, FaultKind, FaultTurns, Planned
from baton.lab.chaos.injection import NotMade, NotProven, Scene, in_use
from baton.lab.chaos.proxy import Proxy
from baton.lab.chaos.run import is_crash
from baton.lab.chaos.stack import ProcessPlace, unsound

KILL, STOP, CUT, PARTITION = FaultKind.KILL, FaultKind.STOP, FaultKind.CUT, FaultKind.PARTITION


def planned(kind: FaultKind, target: str, source: str = "", at_once: bool = False) -> Planned:
    return Planned(Fault(kind, target, source), 0.0, at_once)


@pytest.mark.parametrize(
    ("under_way", "wanted", "may"),
    [
        ([], planned(KILL, "decode-0"), True),
        ([Fault(KILL, "decode-1")], planned(KILL, "decode-0"), False),
        ([Fault(KILL, "decode-1")], planned(KILL, "decode-0", at_once=True), False),
        ([Fault(KILL, "decode-1")], planned(KILL, "decode-1"), False),
        ([Fault(KILL, "decode-1")], planned(KILL, "decode-1", at_once=True), True),
        ([Fault(KILL, "decode-1")], planned(STOP, "prefill-0"), True),
        ([Fault(KILL, "decode-1")], planned(PARTITION, "decode-0", "router-1"), False),
        ([Fault(KILL, "decode-1")], planned(PARTITION, "decode-1", "router-1", at_once=True), False),
        ([Fault(KILL, "prefill-1")], planned(PARTITION, "prefill-0", "decode-1"), False),
        ([Fault(KILL, "decode-1")], planned(FaultKind.BIT_FLIP, "prefill-0"), False),
        ([Fault(KILL, "redis")], planned(KILL, "router-0"), True),
        ([Fault(KILL, "decode-1"), Fault(KILL, "prefill-1")], planned(KILL, "router-0"), False),
        ([Fault(KILL, "decode-1"), Fault(KILL, "prefill-1")], planned(STOP, "router-0"), True),
        ([Fault(FaultKind.BIT_FLIP, "prefill-0")], planned(CUT, "router-0", "others"), True),
        ([Fault(KILL, "decode-1")], planned(FaultKind.DISK_FULL, "disk"), True),
        ([Fault(FaultKind.DISK_FULL, "disk")], planned(FaultKind.FILE_FLIP, "disk"), False),
        ([Fault(FaultKind.DISK_FULL, "disk")], planned(FaultKind.FOLDER_TAKEN, "decode-0"), False),
        ([Fault(FaultKind.FILE_CUT, "decode-1")], planned(FaultKind.KILL_WRITING, "decode-0"), False),
        ([Fault(FaultKind.FILE_CUT, "decode-1"), Fault(KILL, "prefill-1")], planned(KILL, "router-0"), False),
        ([Fault(FaultKind.FILE_CUT, "disk"), Fault(KILL, "prefill-1")], planned(KILL, "router-0"), True),
    ],
)
def test_fault_waits_where_nothing_would_be_left(under_way: list[Fault], wanted: Planned, may: bool) -> None:
    assert FaultTurns(under_way).may_begin(wanted, ()) is may


def test_fault_waits_for_unrecovered_workers() -> None:
    assert not FaultTurns().may_begin(planned(KILL, "decode-0"), {"decode-1"})
    assert not FaultTurns().may_begin(planned(KILL, "decode-0"), {"decode-0"})
    assert FaultTurns().may_begin(planned(KILL, "decode-0"), {"prefill-0", "redis"})


def test_link_in_use_is_chosen_and_none_while_all_are_silent() -> None:
    proxies = {name: Proxy(("", 0), ("", 0), lambda _: None) for name in ("prefill-0", "prefill-1", "decode-0")}
    scene = Scene(SimpleNamespace(proxies=proxies), None, random.Random(1))  # type: ignore[arg-type]
    idle = Fault(PARTITION, "prefill-1", "decode-1")
    assert in_use(idle, scene, lambda _: True) is None
    counts = proxies["prefill-0"].counts("decode-1")
    counts.connections, counts.moved_s = 1, time.monotonic()
    assert in_use(idle, scene, lambda _: True) == Fault(PARTITION, "prefill-0", "decode-1")
    assert in_use(idle, scene, lambda fault: fault.target != "prefill-0") is None
    assert in_use(Fault(KILL, "decode-0"), scene, lambda _: True) == Fault(KILL, "decode-0")


class Sound:
    """Stack whose processes always serve."""

    unsound: dict[str, str] = {}  # noqa: RUF012

    async def next_look(self) -> None:
        await asyncio.sleep(0)

    async def recovered(self, names: frozenset[str], within_s: float) -> str:
        return ""


@dataclass
class Fake:
    """Injection that raises a given error, and records that it was undone."""

    error: Exception | None
    healed: list[bool] = field(default_factory=list)

    async def inject(self) -> None: ...

    async def prove(self) -> str:
        if self.error is not None:
            raise self.error
        return "seen"

    async def heal(self) -> None:
        self.healed.append(True)


async def carry_out(plan: list[Planned], errors: list[Exception | None], wanted: int | None = None) -> FaultCampaign:
    fakes = iter([Fake(error) for error in errors])
    scene = Scene(None, None, random.Random(1))  # type: ignore[arg-type]
    make = lambda fault, scene: next(fakes)  # noqa: E731
    campaign = FaultCampaign(scene, Sound(), plan, make, lambda line: None, 0.0, wanted)  # type: ignore[arg-type]
    await campaign.run(time.monotonic() + 10)
    return campaign


async def test_unmade_fault_is_retried_and_counts_once() -> None:
    found = await carry_out([planned(KILL, "decode-0")], [NotMade("nobody there"), None])
    assert [each.proof for each in found.injected] == ["seen"]
    assert [each.why for each in found.unmade] == ["nobody there"]


async def test_fault_without_a_target_is_given_up_and_reported() -> None:
    found = await carry_out([planned(KILL, "decode-0")], [NotMade("nobody there")] * TRIES)
    assert len(found.unmade) == TRIES
    assert never_made(found.injected, found.unmade) == [KILL]
    proven = Injected(Fault(KILL, "decode-1"), 0.0, 0.0, "seen")
    assert never_made([proven], found.unmade) == []
    assert never_made([], [Unmade(Fault(KILL, "decode-0"), 0.0, "")]) == []


async def test_unproven_fault_is_retried_and_counted_apart() -> None:
    found = await carry_out([planned(KILL, "decode-0")], [NotProven("still there"), None])
    assert [(each.proof, each.trouble) for each in found.injected] == [(None, "still there"), ("seen", "")]
    assert (found.unmade, too_few_proven(found.injected)) == ([], [])


async def test_never_proven_kind_fails_the_campaign() -> None:
    found = await carry_out([planned(KILL, "decode-0")], [NotProven("still there")] * TRIES)
    assert len(found.injected) == TRIES
    assert too_few_proven(found.injected) == [KILL]


@pytest.mark.parametrize(("proven", "unproven", "enough"), [(1, 0, True), (1, 1, True), (2, 3, False), (0, 1, False)])
def test_half_of_each_kind_must_be_proven(proven: int, unproven: int, enough: bool) -> None:
    made = [Injected(Fault(KILL, "decode-0"), 0.0, 1.0, proof) for proof in ["gone"] * proven + [None] * unproven]
    others = [Injected(Fault(STOP, "decode-0"), 0.0, 1.0, "stood still")] * 9
    assert too_few_proven([*made, *others]) == ([] if enough else [KILL])


async def test_error_of_an_injection_ends_the_campaign_and_is_no_fault() -> None:
    with pytest.raises(ExceptionGroup) as raised:
        await carry_out([planned(KILL, "decode-0")], [KeyError("reads")])
    assert raised.group_contains(KeyError)


async def test_it_ends_when_enough_is_proven() -> None:
    plan = [planned(KILL, "decode-0") for _ in range(5)]
    found = await carry_out(plan, [None, NotProven(""), None, None, None], wanted=2)
    assert len(found.injected) == 3


def test_worker_unusable_for_a_router_is_not_sound() -> None:
    workers = [ProcessPlace("prefill-0", 1, ""), ProcessPlace("decode-0", 2, "")]
    there = [SimpleNamespace(worker_id=each.name, connected=True, load=1) for each in workers]
    sees_all = SimpleNamespace(ready=True, registry_connected=True, detail="", workers=there)
    blind = SimpleNamespace(ready=True, registry_connected=False, detail="", workers=there[:1])
    everybody = ["redis", "router-0", "router-1", "prefill-0", "decode-0"]

    def names(told: dict[str, object], running: list[str]) -> set[str]:
        return set(unsound(ProcessPlace("redis", 0, ""), told, workers, running, {}))  # type: ignore[arg-type]

    assert names({"router-0": sees_all, "router-1": sees_all}, everybody) == set()
    assert names({"router-0": sees_all, "router-1": blind}, everybody) == {"redis", "decode-0"}
    assert names({"router-0": sees_all, "router-1": None}, everybody) == {"router-1"}
    assert names({"router-0": sees_all, "router-1": None}, everybody[:2]) == {"router-1", "prefill-0", "decode-0"}


def test_disk_that_a_worker_does_without_is_not_sound() -> None:
    sees_all = SimpleNamespace(ready=True, registry_connected=True, detail="", workers=[])
    off = {"decode-0": "reads, writes"}
    found = unsound(ProcessPlace("redis", 0, ""), {"router-0": sees_all}, [], ["redis", "router-0"], off)  # type: ignore[dict-item]
    assert found == {"disk": "is not used by decode-0: reads, writes"}


@pytest.mark.parametrize(
    ("event", "crashed"),
    [
        ("decode-0 ended with exit code 0; restarting it in 0.2 s", False),
        ("decode-0 ended with exit code 143; restarting it in 0.2 s", False),  # SIGTERM before it served
        ("decode-0 ended with exit code 1; restarting it in 0.2 s", True),
        ("decode-0 ended with exit code 139; restarting it in 0.2 s", True),
        ("decode-0 was ended by SIGKILL; restarting it in 0.2 s", False),
    ],
)
def test_is_crash_exit_of_a_process_is_judged_by_its_code(event: str, crashed: bool) -> None:
    assert is_crash(event) is crashed
