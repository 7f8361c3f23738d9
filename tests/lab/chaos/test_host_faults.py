"""Faults of hosts and links: how they are planned, when they are possible, and that one without effect is noticed."""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from baton.lab.chaos import injection
from baton.lab.chaos.campaign import make_injection
from baton.lab.chaos.faults import (
    DECODE,
    FIRST_HOST,
    PREFILL,
    Fault,
    FaultKind,
    FaultTurns,
    Planned,
    plan_faults,
    spread,
)
from baton.lab.chaos.hosts import injections
from baton.lab.chaos.hosts.injections import HOST_KINDS, HostLost, LinkChanged
from baton.lab.chaos.hosts.stack import HostedStack
from baton.lab.chaos.injection import NotMade, NotProven, Scene, Signalled, Stopped
from baton.lab.chaos.stack import ChaosStack
from baton.lab.chaos.watch import Life, life_of
from baton.lab.harness.hosts.network import LinkCounts
from baton.lab.harness.hosts.shaping import HostLink

LOST = Fault(FaultKind.HOST_LOST, "host-1", on_host=frozenset({"prefill-0", "decode-0"}))


@pytest.mark.parametrize("hosts", [3, 4, 5])
def test_any_host_of_workers_may_be_lost_and_both_roles_go_on(hosts: int) -> None:
    placed = spread(hosts)
    assert len(placed) == hosts and all(placed.values())
    for lost in set(placed) - {FIRST_HOST}:
        left = {name for host, names in placed.items() if host != lost for name in names}
        assert left & set(PREFILL) and left & set(DECODE)


@pytest.mark.parametrize("hosts", [2, 6])
def test_too_few_and_too_many_hosts_are_refused(hosts: int) -> None:
    with pytest.raises(ValueError, match="from 3 to 5"):
        spread(hosts)


def test_seed_makes_the_same_faults_of_every_kind_and_none_of_the_first_host() -> None:
    plan = plan_faults(4, 300, hosts=3)
    assert plan == plan_faults(4, 300, hosts=3) != plan_faults(5, 300, hosts=3)
    of_hosts = [each.fault for each in plan if each.fault.on_host]
    kinds = Counter(each.kind for each in of_hosts)
    assert set(kinds) == HOST_KINDS
    assert {each.target for each in of_hosts} == {"host-1", "host-2"}
    assert all(each.on_host == set(spread(3)[each.target]) for each in of_hosts)


@pytest.mark.parametrize(
    ("wanted", "may"),
    [
        (Fault(FaultKind.KILL, "decode-1"), False),
        (Fault(FaultKind.LINK_CUT, "host-2", on_host=frozenset({"prefill-1", "decode-1"})), False),
        (Fault(FaultKind.KILL, "router-0"), True),
    ],
)
def test_surviving_processes_of_a_lost_host_are_left_alone(wanted: Fault, may: bool) -> None:
    assert FaultTurns([LOST]).may_begin(Planned(wanted, 0.0, at_once=False), ()) is may


def test_processes_of_a_lost_host_are_not_hit_again() -> None:
    again = Planned(Fault(FaultKind.KILL, "decode-0"), 0.0, at_once=True)
    assert not FaultTurns([LOST]).may_begin(again, ())
    assert FaultTurns([Fault(FaultKind.KILL, "decode-0")]).may_begin(again, ())


@dataclass
class FakeNetwork:
    """Network of hosts. `deaf`: faults have no effect, as with a broken injector. `quiet`: there are no packets."""

    deaf: bool = False
    quiet: bool = False
    is_changed: bool = False

    def cut(self, host: str) -> None:
        self.is_changed = not self.deaf

    def shape(self, host: str, link: HostLink) -> None:
        self.is_changed = not self.deaf and link != injections.USUAL

    def mend(self, host: str) -> None:
        self.is_changed = False

    def counts(self, host: str) -> LinkCounts:
        return LinkCounts(7, 7, 7) if self.is_changed and not self.quiet else LinkCounts(0, 0, 0)

    def first_process(self, host: str) -> int:
        return os.getpid()


class FakeStack(HostedStack):
    """Stack with a network and one process."""

    def __init__(self, network: FakeNetwork) -> None:
        self.network: Any = network
        self.hosts = spread(3)
        self.lost: list[str] = []
        self.back: list[str] = []

    async def change(self, call: Callable[..., Any], *arguments: object) -> Any:
        return call(*arguments)

    def life(self, name: str) -> Life | None:
        return life_of(os.getpid())

    async def lose(self, host: str) -> None:
        self.lost.append(host)

    async def bring_back(self, host: str) -> None:
        self.back.append(host)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(injections, "SEEN_S", 0.1)
    monkeypatch.setattr(injection, "PROOF_S", 0.1)


@pytest.mark.parametrize("link", [None, HostLink(loss=0.2), HostLink(bits_per_s=1e6)])
async def test_changed_link_is_proved_by_the_packets_that_met_it(link: HostLink | None) -> None:
    network = FakeNetwork()
    changed = LinkChanged(FakeStack(network), "host-1", link, 0.0)
    await changed.inject()
    assert (await changed.prove()).startswith("7 ")
    await changed.heal()
    assert not network.is_changed


@pytest.mark.parametrize("network", [FakeNetwork(deaf=True), FakeNetwork(quiet=True)])
async def test_link_on_which_nothing_was_met_was_not_changed(network: FakeNetwork) -> None:
    changed = LinkChanged(FakeStack(network), "host-1", None, 0.0)
    await changed.inject()
    with pytest.raises(NotMade):
        await changed.prove()


async def test_host_with_live_processes_was_not_lost_and_returns() -> None:
    stack = FakeStack(FakeNetwork())
    lost = HostLost(stack, "host-1", 0.0)
    await lost.inject()
    with pytest.raises(NotProven, match="host-1"):
        await lost.prove()
    await lost.heal()
    assert (stack.lost, stack.back) == (["host-1"], ["host-1"])


def test_every_fault_of_a_plan_is_an_injection_on_hosts_and_none_without(tmp_path: Path) -> None:
    stack = FakeStack(FakeNetwork())
    made = {
        planned.fault.kind: type(make_injection(planned.fault, Scene(stack, None, None)))  # type: ignore[arg-type]
        for planned in plan_faults(1, 200, hosts=4)
    }
    of_links = (FaultKind.LINK_CUT, FaultKind.LINK_SLOW, FaultKind.LINK_LOSSY)
    of_processes = {FaultKind.KILL: Signalled, FaultKind.STOP: Stopped, FaultKind.RESTART: Signalled}
    assert made == {**dict.fromkeys(of_links, LinkChanged), FaultKind.HOST_LOST: HostLost, **of_processes}
    with pytest.raises(NotMade, match="no hosts"):
        make_injection(LOST, Scene(ChaosStack(tmp_path, tmp_path, None), None, None))  # type: ignore[arg-type]
