"""Catalogue of faults, their order in a run, and the rule for overlapping faults. Pure: a seed determines the plan."""

import random
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

SHORT_S, LONG_S = 1.0, 4.0
OVERLAP = 0.15  # fraction of the planned faults that may hit a process while it recovers from another fault
DISK = "disk"  # target of faults that hit the KV files of all workers
ROUTERS, PREFILL, DECODE = ("router-0", "router-1"), ("prefill-0", "prefill-1"), ("decode-0", "decode-1")
MOST_ROUTERS = 4
ALL_ROUTERS = tuple(f"router-{number}" for number in range(MOST_ROUTERS))
"""Names of routers in a run with the most routers; a run without an option has those of `ROUTERS`."""
WORKERS = (*PREFILL, *DECODE)
FIRST_HOST = "host-0"  # host of the routers and Redis; no fault hits it or its link
LEAST_HOSTS, MOST_HOSTS = 3, 1 + len(WORKERS)
LOSSES = (0.02, 0.1, 0.3)  # fractions of packets that a link loses
RATES = (1e6, 4e6, 20e6)  # bits per second of a slow link
DELAYS_S = (0.005, 0.05, 0.2)
CLOCK_JUMPS_S = (-3600.0, 3600.0, 86_400.0)


class FaultKind(StrEnum):
    KILL = "kill -9"
    STOP = "SIGSTOP"  # the process is stopped, and continued by SIGCONT after a while
    RESTART = "SIGTERM"  # the process drains and exits, and the supervisor restarts it
    CUT = "connections cut"
    PARTITION = "partition"  # no bytes pass a link in either direction
    ONE_WAY = "one-way partition"
    DELAY = "delay"
    BIT_FLIP = "bit flip"
    FLUSH = "FLUSHALL"
    CLOCK = "clock jump"
    READ_ERROR = "EIO on read"  # first of the faults of KV files, which end with FOLDER_TAKEN
    WRITE_ERROR = "EIO on write"
    DISK_FULL = "disk full"
    DISK_HANGS = "disk hangs"
    SHORT_WRITES = "short writes"
    KILL_WRITING = "kill -9 in a write"
    FILE_FLIP = "bits flip in files"
    FILE_CUT = "files cut off"
    FILE_GARBAGE = "garbage in files"
    OTHER_MODEL = "another model's files"
    FOLDER_TAKEN = "folder taken"
    LINK_CUT = "link cut"  # fault of a host's network link, as are LINK_SLOW and LINK_LOSSY
    LINK_SLOW = "link slow"
    LINK_LOSSY = "packets lost"
    HOST_LOST = "host lost"


@dataclass(frozen=True, slots=True)
class Fault:
    """Fault of a process, host, link or disk.

    `source`: process whose connections to `target` are disturbed; empty: the fault hits the target itself.
    """

    kind: FaultKind
    target: str
    source: str = ""
    lasts_s: float = 0.0
    amount: float = 0.0  # by kind: delay or clock jump in seconds, fraction of lost packets, or bits per second
    on_host: frozenset[str] = frozenset()  # processes of the host, if the target is a host

    @property
    def disturbs(self) -> frozenset[str]:
        """Names of the processes that may be unavailable during the fault."""
        if self.kind is FaultKind.BIT_FLIP:
            return frozenset((self.target, *DECODE))  # the injection stops decode workers for a moment
        if self.kind is FaultKind.FOLDER_TAKEN:
            return frozenset((self.target, DISK))  # during the fault, the target serves without KV files
        if self.on_host:
            return self.on_host
        return frozenset((self.target,)) if self.target else frozenset()

    @property
    def restarts(self) -> bool:
        """Return whether a process is restarted because of the fault."""
        return self.kind in _RESTARTED or (self.kind in _OF_FILES and self.target in WORKERS)

    @property
    def hits_process(self) -> bool:
        """Return whether the fault is a signal to a process, and not a fault of its connections, memory or files."""
        return self.kind in (FaultKind.KILL, FaultKind.STOP, FaultKind.RESTART)

    def __str__(self) -> str:
        between = f"{self.source} to {self.target}" if self.source else self.target
        return f"{self.kind} {between}".rstrip()


@dataclass(frozen=True, slots=True)
class Planned:
    """Planned fault. `at_once`: inject it even if its target has not recovered from an earlier fault."""

    fault: Fault
    pause_s: float  # time between this fault and the next one of the plan
    at_once: bool
    tries: int = 0  # number of earlier attempts, which found nothing to break or were not proven


Hosts = Mapping[str, tuple[str, ...]]
"""Names of the processes on each host; empty if all processes run on this machine."""


def spread(hosts: int) -> Hosts:
    """Assign the processes to hosts so that a worker of each role survives the loss of any one host except the first.

    Raises: ValueError.
    """
    if not LEAST_HOSTS <= hosts <= MOST_HOSTS:
        limits = f"from {LEAST_HOSTS} to {MOST_HOSTS}"
        raise ValueError(
            f"{hosts} hosts are not possible: use {limits}, so that each role runs on two hosts and no host is empty"
        )
    names = [f"host-{number}" for number in range(1, hosts)]
    placed: dict[str, tuple[str, ...]] = {FIRST_HOST: ("redis", *ROUTERS), **dict.fromkeys(names, ())}
    for number, worker in enumerate(WORKERS):
        name = names[number % len(names)]
        placed[name] = (*placed[name], worker)
    return placed


def _process(kind: FaultKind, names: tuple[str, ...], draw: random.Random) -> Fault:
    return Fault(kind, draw.choice(names), lasts_s=draw.uniform(SHORT_S, LONG_S))


def _link(kind: FaultKind, draw: random.Random) -> Fault:
    """Draw a fault of a link between a router and a worker, or between a decode worker and a prefill worker."""
    if draw.random() < 0.7:
        source, target = draw.choice(ROUTERS), draw.choice(WORKERS)
    else:
        source, target = draw.choice(DECODE), draw.choice(PREFILL)
    amount = draw.choice(DELAYS_S) if kind is FaultKind.DELAY else 0.0
    return Fault(kind, target, source, draw.uniform(SHORT_S, LONG_S), amount)


def _redis(kind: FaultKind, draw: random.Random) -> Fault:
    source = draw.choice((*ROUTERS, *WORKERS)) if kind is FaultKind.PARTITION else ""
    return Fault(kind, "redis", source, draw.uniform(SHORT_S, LONG_S))


def _disk(kind: FaultKind, draw: random.Random) -> Fault:
    return Fault(kind, DISK, lasts_s=draw.uniform(SHORT_S, LONG_S))


def _files(kind: FaultKind, draw: random.Random) -> Fault:
    """Draw a fault of KV files: of all running workers, or of one worker, which is killed first."""
    return Fault(kind, DISK if draw.random() < 0.6 else draw.choice(WORKERS))


def _host(kind: FaultKind, draw: random.Random, hosts: Hosts) -> Fault:
    name = draw.choice([each for each in hosts if each != FIRST_HOST])
    amounts = {FaultKind.LINK_SLOW: RATES, FaultKind.LINK_LOSSY: LOSSES}.get(kind, (0.0,))
    return Fault(kind, name, "", draw.uniform(SHORT_S, LONG_S), draw.choice(amounts), frozenset(hosts[name]))


class FaultRule(NamedTuple):
    """Entry of the catalogue: relative frequencies of a fault on one machine and on hosts, and its generator."""

    weight: int
    weight_on_hosts: int
    draw: Callable[[random.Random, Hosts], Fault]


CATALOGUE = (
    FaultRule(18, 8, lambda draw, _: _process(FaultKind.KILL, DECODE, draw)),
    FaultRule(10, 6, lambda draw, _: _process(FaultKind.KILL, PREFILL, draw)),
    FaultRule(7, 4, lambda draw, _: _process(FaultKind.KILL, ROUTERS, draw)),
    FaultRule(9, 3, lambda draw, _: _process(FaultKind.STOP, DECODE, draw)),
    FaultRule(5, 3, lambda draw, _: _process(FaultKind.STOP, PREFILL, draw)),
    FaultRule(3, 0, lambda draw, _: _process(FaultKind.STOP, ROUTERS, draw)),
    FaultRule(6, 4, lambda draw, _: _process(FaultKind.RESTART, (*WORKERS, *ROUTERS), draw)),
    FaultRule(6, 0, lambda draw, _: _link(FaultKind.CUT, draw)),
    FaultRule(5, 0, lambda draw, _: Fault(FaultKind.CUT, draw.choice(ROUTERS), "others")),
    FaultRule(7, 0, lambda draw, _: _link(FaultKind.PARTITION, draw)),
    FaultRule(5, 0, lambda draw, _: _link(FaultKind.ONE_WAY, draw)),
    FaultRule(4, 0, lambda draw, _: _link(FaultKind.DELAY, draw)),
    FaultRule(3, 0, lambda draw, _: _redis(FaultKind.KILL, draw)),
    FaultRule(3, 0, lambda draw, _: _redis(FaultKind.STOP, draw)),
    FaultRule(3, 0, lambda draw, _: _redis(FaultKind.FLUSH, draw)),
    FaultRule(3, 0, lambda draw, _: _redis(FaultKind.PARTITION, draw)),
    FaultRule(3, 0, lambda draw, _: Fault(FaultKind.BIT_FLIP, draw.choice(PREFILL))),
    FaultRule(3, 0, lambda draw, _: Fault(FaultKind.CLOCK, "", "", SHORT_S, draw.choice(CLOCK_JUMPS_S))),
    FaultRule(3, 0, lambda draw, _: _disk(FaultKind.READ_ERROR, draw)),
    FaultRule(3, 0, lambda draw, _: _disk(FaultKind.WRITE_ERROR, draw)),
    FaultRule(3, 0, lambda draw, _: _disk(FaultKind.DISK_FULL, draw)),
    FaultRule(3, 0, lambda draw, _: _disk(FaultKind.DISK_HANGS, draw)),
    FaultRule(2, 0, lambda draw, _: _disk(FaultKind.SHORT_WRITES, draw)),
    FaultRule(5, 0, lambda draw, _: _process(FaultKind.KILL_WRITING, WORKERS, draw)),
    FaultRule(4, 0, lambda draw, _: _files(FaultKind.FILE_FLIP, draw)),
    FaultRule(3, 0, lambda draw, _: _files(FaultKind.FILE_CUT, draw)),
    FaultRule(3, 0, lambda draw, _: _files(FaultKind.FILE_GARBAGE, draw)),
    FaultRule(3, 0, lambda draw, _: Fault(FaultKind.OTHER_MODEL, DISK)),
    FaultRule(3, 0, lambda draw, _: _process(FaultKind.FOLDER_TAKEN, WORKERS, draw)),
    FaultRule(0, 22, lambda draw, hosts: _host(FaultKind.LINK_CUT, draw, hosts)),
    FaultRule(0, 22, lambda draw, hosts: _host(FaultKind.HOST_LOST, draw, hosts)),
    FaultRule(0, 14, lambda draw, hosts: _host(FaultKind.LINK_LOSSY, draw, hosts)),
    FaultRule(0, 14, lambda draw, hosts: _host(FaultKind.LINK_SLOW, draw, hosts)),
)


def plan_faults(
    seed: int,
    count: int,
    hosts: int | None = None,
    without: frozenset[FaultKind] = frozenset(),
    routers: int = len(ROUTERS),
) -> list[Planned]:
    """Plan `count` faults. `hosts`: number of hosts; None: all processes run on this machine. Raises: ValueError."""
    draw, placed = random.Random(f"faults {seed}"), {} if hosts is None else spread(hosts)
    weights = [rule.weight_on_hosts if placed else rule.weight for rule in CATALOGUE]
    plan: list[Planned] = []
    while len(plan) < count:
        [rule] = draw.choices(CATALOGUE, weights)
        fault = _among(rule.draw(draw, placed), routers, draw)
        if fault.kind not in without:
            plan.append(Planned(fault, draw.uniform(0.2, 1.5), draw.random() < OVERLAP))
    return plan


def _among(fault: Fault, routers: int, draw: random.Random) -> Fault:
    """Draw the router that a fault of `ROUTERS` hits anew, if there is another number of routers."""
    if routers == len(ROUTERS):
        return fault
    any_router = draw.choice(ALL_ROUTERS[:routers])
    source, target = (any_router if each in ROUTERS else each for each in (fault.source, fault.target))
    return replace(fault, source=source, target=target)


STARTS = 2  # maximum number of processes that may start concurrently: each start takes seconds of a core
_RESTARTED = frozenset(
    {FaultKind.KILL, FaultKind.RESTART, FaultKind.KILL_WRITING, FaultKind.FOLDER_TAKEN, FaultKind.HOST_LOST}
)
_OF_FILES = frozenset({FaultKind.FILE_FLIP, FaultKind.FILE_CUT, FaultKind.FILE_GARBAGE})


@dataclass
class FaultTurns:
    """Rule for overlapping faults: at least one router, prefill and decode worker always serve undisturbed.

    `under_way`: faults that are being injected, or whose disturbed processes have not recovered.
    """

    under_way: list[Fault] = field(default_factory=list)

    @property
    def disturbed(self) -> frozenset[str]:
        return frozenset().union(*(fault.disturbs for fault in self.under_way))

    def may_begin(self, planned: Planned, unsound: Collection[str]) -> bool:
        """Return whether the fault may be injected now. `unsound`: names of processes that do not serve now."""
        fault = planned.fault
        busy = self.disturbed | set(unsound)
        gone = frozenset().union(*(each.on_host for each in self.under_way if each.kind is FaultKind.HOST_LOST))
        hits_again = planned.at_once and fault.hits_process and not fault.disturbs & gone
        if fault.disturbs & busy and not hits_again:
            return False
        restarts = sum(each.restarts for each in self.under_way)
        if fault.restarts and restarts >= STARTS:
            return False
        return not any(_peers(name) & busy for name in fault.disturbs if not _peers(name) <= fault.disturbs)


def _peers(name: str) -> Set[str]:
    """Return the other processes of the same role, which take over if this one fails."""
    return next((frozenset(role) - {name} for role in (ALL_ROUTERS, PREFILL, DECODE) if name in role), frozenset())
