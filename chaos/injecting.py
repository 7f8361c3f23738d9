"""Which injection a fault is, on a stack as it is now: links that are disturbed are links in use."""

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from chaos.corruption import FlippedOnTheWay
from chaos.faults import DECODE, PREFILL, ROUTERS, WORKERS, Fault, FaultKind
from chaos.injection import ClockJump, Cut, Flushed, Injection, NotMade, Ruled, Signalled, Stopped
from chaos.proxy import Rule, Way
from chaos.stack import Stack
from chaos.wall_clock import WallClock

EVERYONE = (*ROUTERS, *WORKERS)
IN_USE_S = 1.5  # since something was said there; workers renew their keys in Redis every second
_LINKED = frozenset({FaultKind.CUT, FaultKind.PARTITION, FaultKind.ONE_WAY, FaultKind.DELAY})


@dataclass(frozen=True, slots=True)
class Scene:
    """What injections work on. `ask`: so many prompts that nobody has asked before come from clients at once."""

    stack: Stack
    clock: WallClock | None
    draw: random.Random
    ask: Callable[[int], None] = lambda count: None


def in_use(fault: Fault, scene: Scene, may_begin: Callable[[Fault], bool]) -> Fault | None:
    """The fault, on its link or on another one of that kind that somebody uses now; None where nobody does."""
    if fault.kind not in _LINKED or not fault.source:
        return fault
    others = [each for each in _alike(fault) if each != fault]
    scene.draw.shuffle(others)
    return next((each for each in (fault, *others) if may_begin(each) and _is_used(each, scene.stack)), None)


def _alike(fault: Fault) -> list[Fault]:
    """The same on every link between such processes."""
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    if fault.target == "redis":
        sources, targets = EVERYONE, ("redis",)
    elif fault.source in ROUTERS:
        sources, targets = ROUTERS, WORKERS
    elif fault.source in DECODE:
        sources, targets = DECODE, PREFILL
    else:  # clients
        sources, targets = (fault.source,), ROUTERS
    return [replace(fault, source=source, target=target) for source in sources for target in targets]


def _is_used(fault: Fault, stack: Stack) -> bool:
    if fault.target not in stack.proxies:
        return False
    counts = stack.proxies[fault.target].counts(fault.source)
    return counts.connections > 0 and time.monotonic() - counts.moved_s < IN_USE_S


def injection_of(fault: Fault, scene: Scene) -> Injection:
    """Raises: NotMade where what it needs is not there."""
    stack, draw = scene.stack, scene.draw
    match fault.kind:
        case FaultKind.CLOCK:
            if scene.clock is None:
                raise NotMade("no C compiler, so that no clock can jump")
            return ClockJump(scene.clock, fault.amount, fault.lasts_s)
        case FaultKind.FLUSH:
            return Flushed(stack.redis.port)
        case FaultKind.BIT_FLIP:
            return FlippedOnTheWay(stack, fault.target, draw, scene.ask)
        case FaultKind.CUT | FaultKind.PARTITION | FaultKind.ONE_WAY | FaultKind.DELAY:
            return _on_link(fault, stack, draw)
    life = stack.life(fault.target)
    if life is None:
        raise NotMade(f"{fault.target} is not running")
    match fault.kind:
        case FaultKind.STOP:
            return Stopped(stack, life, fault.lasts_s)
        case FaultKind.RESTART:
            return Signalled(stack, life, signal.SIGTERM)
    return Signalled(stack, life, signal.SIGKILL)


def _on_link(fault: Fault, stack: Stack, draw: random.Random) -> Injection:
    proxy = stack.proxies[fault.target]
    links = [(proxy, source) for source in ((fault.source,) if fault.source else EVERYONE)]
    if fault.kind is FaultKind.CUT:
        return Cut(proxy, fault.source)
    if fault.kind is FaultKind.DELAY:
        rule = Rule(delay_s=fault.amount)
        return Ruled(links, rule, fault.lasts_s, lambda counts: counts.delayed, f"{fault.amount * 1e3:.0f} ms late")
    held = frozenset(Way) if fault.kind is FaultKind.PARTITION else frozenset((draw.choice(list(Way)),))
    what = "held" if len(held) > 1 else f"held {next(iter(held)).value}"
    return Ruled(links, Rule(held=held), fault.lasts_s, lambda counts: counts.held, what)
