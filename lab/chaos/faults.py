"""Faults of a run, their order, and which may overlap. Pure: a seed in, a plan out."""

import random
from collections.abc import Callable, Collection, Set
from dataclasses import dataclass, field
from enum import StrEnum

SHORT_S, LONG_S = 1.0, 4.0
DISK = "disk"  # of all workers
ROUTERS, PREFILL, DECODE = ("router-0", "router-1"), ("prefill-0", "prefill-1"), ("decode-0", "decode-1")
WORKERS = (*PREFILL, *DECODE)


class FaultKind(StrEnum):
    KILL = "kill -9"
    STOP = "SIGSTOP"  # and SIGCONT later
    RESTART = "SIGTERM"  # drain, end, be started again
    CUT = "connections cut"
    PARTITION = "partition"  # nothing passes, either way
    ONE_WAY = "one-way partition"
    DELAY = "delay"
    BIT_FLIP = "bit flip"
    FLUSH = "FLUSHALL"
    CLOCK = "clock jump"
    READ_ERROR = "EIO on read"  # these and the following are of the files below the pools
    WRITE_ERROR = "EIO on write"
    DISK_FULL = "disk full"
    DISK_HANGS = "disk hangs"  # on read
    SHORT_WRITES = "short writes"
    KILL_WRITING = "kill -9 in a write"
    FILE_FLIP = "bits flip in files"  # while all run, or while the owner is down; so with the following two
    FILE_CUT = "files cut off"
    FILE_GARBAGE = "garbage in files"
    OTHER_MODEL = "another model's files"
    FOLDER_TAKEN = "folder taken"  # by another process, while the owner is started again
    LINK_CUT = "link cut"  # of a host, as are the following: see hosts/
    LINK_SLOW = "link slow"
    LINK_LOSSY = "packets lost"
    HOST_LOST = "host lost"


@dataclass(frozen=True, slots=True)
class Fault:
    """Fault. `source`: the process whose connections to `target` are disturbed; empty for faults of a process
    itself.
    """

    kind: FaultKind
    target: str
    source: str = ""
    lasts_s: float = 0.0
    amount: float = 0.0  # seconds of delay, or of a clock's jump; the share of packets that are lost; bits per second
    on_host: frozenset[str] = frozenset()  # the processes of a target that is a host

    @property
    def disturbs(self) -> frozenset[str]:
        """The processes that somebody may have to do without meanwhile."""
        if self.kind is FaultKind.BIT_FLIP:
            return frozenset((self.target, *DECODE))  # these stand still for a moment
        if self.kind is FaultKind.FOLDER_TAKEN:
            return frozenset((self.target, DISK))  # which does without files meanwhile
        if self.on_host:
            return self.on_host
        return frozenset((self.target,)) if self.target else frozenset()

    @property
    def restarts(self) -> bool:
        """A process is started again."""
        return self.kind in _RESTARTED or (self.kind in _OF_FILES and self.target in WORKERS)

    @property
    def hits_process(self) -> bool:
        """A process itself, not its connections or memory."""
        return self.kind in (FaultKind.KILL, FaultKind.STOP, FaultKind.RESTART)

    def __str__(self) -> str:
        between = f"{self.source} to {self.target}" if self.source else self.target
        return f"{self.kind} {between}".rstrip()


@dataclass(frozen=True, slots=True)
class Planned:
    """Planned fault. `at_once`: inject it even if its target has not recovered from the fault before."""

    fault: Fault
    pause_s: float  # before it
    at_once: bool
    tries: int = 0  # that found nothing to break


def _workers(kind: FaultKind, names: tuple[str, ...], draw: random.Random) -> Fault:
    return Fault(kind, draw.choice(names), lasts_s=draw.uniform(SHORT_S, LONG_S))


def _link(kind: FaultKind, draw: random.Random) -> Fault:
    """Draw a link between a router and a worker, or between a decode worker and its prefill worker."""
    if draw.random() < 0.7:
        source, target = draw.choice(ROUTERS), draw.choice(WORKERS)
    else:
        source, target = draw.choice(DECODE), draw.choice(PREFILL)
    amount = draw.choice((0.005, 0.05, 0.2)) if kind is FaultKind.DELAY else 0.0
    return Fault(kind, target, source, draw.uniform(SHORT_S, LONG_S), amount)


def _redis(kind: FaultKind, draw: random.Random) -> Fault:
    source = draw.choice((*ROUTERS, *WORKERS)) if kind is FaultKind.PARTITION else ""
    return Fault(kind, "redis", source, draw.uniform(SHORT_S, LONG_S))


def _disk(kind: FaultKind, draw: random.Random) -> Fault:
    return Fault(kind, DISK, lasts_s=draw.uniform(SHORT_S, LONG_S))


def _files(kind: FaultKind, draw: random.Random) -> Fault:
    """Draw the files of all running workers, or of one that is down."""
    return Fault(kind, DISK if draw.random() < 0.6 else draw.choice(WORKERS))


def _clients(draw: random.Random) -> Fault:
    return Fault(FaultKind.CUT, draw.choice(ROUTERS), "others")


_Make = Callable[[random.Random], Fault]
_KINDS: tuple[tuple[int, _Make], ...] = (
    # how often, in parts of the whole, and how one is drawn
    (18, lambda draw: _workers(FaultKind.KILL, DECODE, draw)),
    (10, lambda draw: _workers(FaultKind.KILL, PREFILL, draw)),
    (7, lambda draw: _workers(FaultKind.KILL, ROUTERS, draw)),
    (9, lambda draw: _workers(FaultKind.STOP, DECODE, draw)),
    (5, lambda draw: _workers(FaultKind.STOP, PREFILL, draw)),
    (3, lambda draw: _workers(FaultKind.STOP, ROUTERS, draw)),
    (6, lambda draw: _workers(FaultKind.RESTART, (*WORKERS, *ROUTERS), draw)),
    (6, lambda draw: _link(FaultKind.CUT, draw)),
    (5, lambda draw: _clients(draw)),
    (7, lambda draw: _link(FaultKind.PARTITION, draw)),
    (5, lambda draw: _link(FaultKind.ONE_WAY, draw)),
    (4, lambda draw: _link(FaultKind.DELAY, draw)),
    (3, lambda draw: _redis(FaultKind.KILL, draw)),
    (3, lambda draw: _redis(FaultKind.STOP, draw)),
    (3, lambda draw: _redis(FaultKind.FLUSH, draw)),
    (3, lambda draw: _redis(FaultKind.PARTITION, draw)),
    (3, lambda draw: Fault(FaultKind.BIT_FLIP, draw.choice(PREFILL))),
    (3, lambda draw: Fault(FaultKind.CLOCK, "", lasts_s=SHORT_S, amount=draw.choice((-3600.0, 3600.0, 86_400.0)))),
    (3, lambda draw: _disk(FaultKind.READ_ERROR, draw)),
    (3, lambda draw: _disk(FaultKind.WRITE_ERROR, draw)),
    (3, lambda draw: _disk(FaultKind.DISK_FULL, draw)),
    (3, lambda draw: _disk(FaultKind.DISK_HANGS, draw)),
    (2, lambda draw: _disk(FaultKind.SHORT_WRITES, draw)),
    (5, lambda draw: _workers(FaultKind.KILL_WRITING, WORKERS, draw)),
    (4, lambda draw: _files(FaultKind.FILE_FLIP, draw)),
    (3, lambda draw: _files(FaultKind.FILE_CUT, draw)),
    (3, lambda draw: _files(FaultKind.FILE_GARBAGE, draw)),
    (3, lambda draw: Fault(FaultKind.OTHER_MODEL, DISK)),
    (3, lambda draw: _workers(FaultKind.FOLDER_TAKEN, WORKERS, draw)),
)


def plan_faults(
    seed: int, count: int, overlap: float = 0.15, without: frozenset[FaultKind] = frozenset()
) -> list[Planned]:
    """Plan `count` faults. `overlap`: share that may hit a process that is still recovering."""
    draw = random.Random(f"faults {seed}")
    weights = [weight for weight, _ in _KINDS]
    plan: list[Planned] = []
    while len(plan) < count:
        [(_, make)] = draw.choices(_KINDS, weights)
        fault = make(draw)
        if fault.kind not in without:
            plan.append(Planned(fault, draw.uniform(0.2, 1.5), draw.random() < overlap))
    return plan


STARTS = 2  # processes that are being started again at a time: each takes seconds of a core
_RESTARTED = frozenset(
    {FaultKind.KILL, FaultKind.RESTART, FaultKind.KILL_WRITING, FaultKind.FOLDER_TAKEN, FaultKind.HOST_LOST}
)
_OF_FILES = frozenset({FaultKind.FILE_FLIP, FaultKind.FILE_CUT, FaultKind.FILE_GARBAGE})


@dataclass
class FaultTurns:
    """Rule for overlapping faults: one router, one prefill and one decode worker are always undisturbed and recovered.

    `under_way`: faults from before their injection until everything they disturbed has recovered.
    """

    under_way: list[Fault] = field(default_factory=list)

    @property
    def disturbed(self) -> frozenset[str]:
        return frozenset().union(*(fault.disturbs for fault in self.under_way))

    def may_begin(self, planned: Planned, unsound: Collection[str]) -> bool:
        """Return whether the fault may start. `unsound`: processes that do not serve now, for any reason."""
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
    """Return the processes that can take over from this one."""
    return next((frozenset(role) - {name} for role in (ROUTERS, PREFILL, DECODE) if name in role), frozenset())
