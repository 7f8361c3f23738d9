"""Placement of processes on hosts, and the faults of such a run. Pure."""

import random
from collections.abc import Callable, Mapping

from baton.lab.chaos.faults import DECODE, LONG_S, PREFILL, ROUTERS, SHORT_S, WORKERS, Fault, FaultKind, Planned

FIRST = "host-0"  # of routers and Redis: nothing goes on without it, so that nothing is done to it or its link
LEAST, MOST = 3, 1 + len(WORKERS)  # hosts
LOSSES = (0.02, 0.1, 0.3)
RATES = (1e6, 4e6, 20e6)  # bits per second
OVERLAP = 0.15  # the share of faults that may hit what is still recovering


def spread(hosts: int) -> dict[str, tuple[str, ...]]:
    """Processes by host. A worker of each role can go on when any one host is lost. Raises: ValueError."""
    if not LEAST <= hosts <= MOST:
        raise ValueError(f"{hosts} hosts: from {LEAST} to {MOST}, so that each role is on two and no host is empty")
    names = [f"host-{number}" for number in range(1, hosts)]
    placed: dict[str, tuple[str, ...]] = {FIRST: ("redis", *ROUTERS), **dict.fromkeys(names, ())}
    for number, worker in enumerate(WORKERS):
        name = names[number % len(names)]
        placed[name] = (*placed[name], worker)
    return placed


_Make = Callable[[random.Random, Mapping[str, tuple[str, ...]]], Fault]


def _of_host(kind: FaultKind, draw: random.Random, placed: Mapping[str, tuple[str, ...]]) -> Fault:
    name = draw.choice([each for each in placed if each != FIRST])
    amounts = {FaultKind.LINK_SLOW: RATES, FaultKind.LINK_LOSSY: LOSSES}.get(kind, (0.0,))
    return Fault(kind, name, "", draw.uniform(SHORT_S, LONG_S), draw.choice(amounts), frozenset(placed[name]))


def _of_process(kind: FaultKind, names: tuple[str, ...], draw: random.Random) -> Fault:
    return Fault(kind, draw.choice(names), lasts_s=draw.uniform(SHORT_S, LONG_S))


_KINDS: tuple[tuple[int, _Make], ...] = (
    # how often, in parts of the whole, and how one is drawn
    (22, lambda draw, placed: _of_host(FaultKind.LINK_CUT, draw, placed)),
    (22, lambda draw, placed: _of_host(FaultKind.HOST_LOST, draw, placed)),
    (14, lambda draw, placed: _of_host(FaultKind.LINK_LOSSY, draw, placed)),
    (14, lambda draw, placed: _of_host(FaultKind.LINK_SLOW, draw, placed)),
    (8, lambda draw, placed: _of_process(FaultKind.KILL, DECODE, draw)),
    (6, lambda draw, placed: _of_process(FaultKind.KILL, PREFILL, draw)),
    (4, lambda draw, placed: _of_process(FaultKind.KILL, ROUTERS, draw)),
    (6, lambda draw, placed: _of_process(FaultKind.STOP, WORKERS, draw)),
    (4, lambda draw, placed: _of_process(FaultKind.RESTART, (*WORKERS, *ROUTERS), draw)),
)


def plan_host_faults(seed: int, count: int, hosts: int) -> list[Planned]:
    """Plan `count` faults. Raises: ValueError."""
    draw, placed = random.Random(f"host faults {seed}"), spread(hosts)
    weights = [weight for weight, _ in _KINDS]
    plan: list[Planned] = []
    while len(plan) < count:
        [(_, make)] = draw.choices(_KINDS, weights)
        fault = make(draw, placed)
        plan.append(Planned(fault, draw.uniform(0.2, 1.5), draw.random() < OVERLAP))
    return plan
