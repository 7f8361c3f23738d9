"""Which injection a fault is, on a stack."""

import random
import signal

from chaos.corruption import FlippedOnTheWay
from chaos.faults import Fault, FaultKind
from chaos.injection import ClockJump, Cut, Flushed, Injection, NotProven, Ruled, Signalled, Stopped
from chaos.proxy import Rule, Way
from chaos.stack import Stack
from chaos.wall_clock import WallClock

EVERYONE = ("router-0", "router-1", "prefill-0", "prefill-1", "decode-0", "decode-1")


def injection_of(fault: Fault, stack: Stack, clock: WallClock | None, draw: random.Random) -> Injection:
    """Raises: NotProven where what it needs is not there."""
    if fault.kind is FaultKind.CLOCK:
        if clock is None:
            raise NotProven("no C compiler, so that no clock can jump")
        return ClockJump(clock, fault.amount, fault.lasts_s)
    if fault.kind is FaultKind.FLUSH:
        return Flushed(stack.redis.port)
    if fault.kind is FaultKind.BIT_FLIP:
        return FlippedOnTheWay(stack, fault.target, draw)
    proxy = stack.proxies[fault.target]
    links = [(proxy, source) for source in ((fault.source,) if fault.source else EVERYONE)]
    both = frozenset((Way.THERE, Way.BACK))
    match fault.kind:
        case FaultKind.CUT:
            return Cut(proxy, fault.source)
        case FaultKind.PARTITION:
            return Ruled(links, Rule(held=both), fault.lasts_s, lambda counts: counts.held, "held")
        case FaultKind.ONE_WAY:
            one = draw.choice((Way.THERE, Way.BACK))
            return Ruled(
                links, Rule(held=frozenset((one,))), fault.lasts_s, lambda counts: counts.held, f"held {one.value}"
            )
        case FaultKind.DELAY:
            rule = Rule(delay_s=fault.amount)
            return Ruled(links, rule, fault.lasts_s, lambda counts: counts.delayed, f"{fault.amount * 1e3:.0f} ms late")
    life = stack.life(fault.target)
    if life is None:
        raise NotProven(f"{fault.target} is not running")
    match fault.kind:
        case FaultKind.STOP:
            return Stopped(stack, life, fault.lasts_s)
        case FaultKind.RESTART:
            return Signalled(stack, life, signal.SIGTERM)
    return Signalled(stack, life, signal.SIGKILL)
