"""Injections of host and link faults, proven by the kernel's packet counters."""

import asyncio
from dataclasses import dataclass

from baton.lab.chaos.faults import Fault, FaultKind
from baton.lab.chaos.hosts.stack import USUAL, HostedStack
from baton.lab.chaos.injection import Injection, NotMade, NotProven, Scene, shown
from baton.lab.chaos.watch import Life, is_alive, life_of
from baton.lab.harness.hosts.network import HostsUnavailable, LinkCounts
from baton.lab.harness.hosts.shaping import HostLink

SLOW_DELAY_MS = 40.0  # delay of a slow link in each direction, in addition to its low rate
SEEN_S = 5.0  # longest wait until the changed link affects a packet
POLL_S = 0.05
NONE = LinkCounts(0, 0, 0)


@dataclass
class LinkChanged:
    """Injection of a temporary change of a host's link. `link`: the changed link; None: it drops all packets."""

    stack: HostedStack
    host: str
    link: HostLink | None
    lasts_s: float
    before: LinkCounts = NONE

    async def inject(self) -> None:
        self.before = await self._counts()
        if self.link is None:
            await self.stack.change(self.stack.network.cut, self.host)
        else:
            await self.stack.change(self.stack.network.shape, self.host, self.link)

    async def prove(self) -> str:
        until_s = asyncio.get_running_loop().time() + SEEN_S
        while (met := await self._met()) < 1:
            if asyncio.get_running_loop().time() > until_s:
                raise NotMade("no packet used the changed link")
            await asyncio.sleep(POLL_S)
        await asyncio.sleep(self.lasts_s)
        met = await self._met()
        if met < 1:
            raise NotProven("the kernel's packet counters were reset")
        if not self._is_slow:
            return f"{met} packets dropped in {self.lasts_s:.1f} s"
        waited = (await self._counts()).waited
        return f"{met} packets delayed, {waited} waits for the rate, in {self.lasts_s:.1f} s"

    async def heal(self) -> None:
        await self.stack.change(self.stack.network.shape, self.host, USUAL)
        await self.stack.change(self.stack.network.mend, self.host)

    @property
    def _is_slow(self) -> bool:
        return self.link is not None and self.link.bits_per_s is not None

    async def _met(self) -> int:
        """Return the number of packets that the changed link has delayed or dropped."""
        counts = await self._counts()
        return counts.limited if self._is_slow else counts.dropped - self.before.dropped

    async def _counts(self) -> LinkCounts:
        try:
            return await self.stack.change(self.stack.network.counts, self.host)
        except HostsUnavailable as error:
            raise NotProven(str(error)) from error


@dataclass
class HostLost:
    """Injection of the loss of a host. All its processes die; later the host boots and the supervisor restarts them."""

    stack: HostedStack
    host: str
    lasts_s: float
    lives: tuple[Life, ...] = ()

    async def inject(self) -> None:
        lives = [life for name in self.stack.hosts[self.host] if (life := self.stack.life(name)) is not None]
        first = life_of(self.stack.network.first_process(self.host))
        if first is None or not lives:
            raise NotMade(f"{self.host} has no process to lose")
        self.lives = (first, *lives)
        await self.stack.lose(self.host)

    async def prove(self) -> str:
        await shown(lambda: not any(map(is_alive, self.lives)), f"the end of all of {self.host}")
        await asyncio.sleep(self.lasts_s)
        return f"{len(self.lives)} processes gone, without closing connections, for {self.lasts_s:.1f} s"

    async def heal(self) -> None:
        if self.lives:
            await self.stack.bring_back(self.host)


HOST_KINDS = frozenset({FaultKind.LINK_CUT, FaultKind.LINK_SLOW, FaultKind.LINK_LOSSY, FaultKind.HOST_LOST})


def host_injection(fault: Fault, scene: Scene) -> Injection:
    """Create the injection of a fault of HOST_KINDS. Raises: NotMade if the stack has no hosts."""
    stack = scene.stack
    if not isinstance(stack, HostedStack):
        raise NotMade("the stack has no hosts of its own")
    link: HostLink | None = None
    match fault.kind:
        case FaultKind.HOST_LOST:
            return HostLost(stack, fault.target, fault.lasts_s)
        case FaultKind.LINK_SLOW:
            link = HostLink(fault.amount, SLOW_DELAY_MS)
        case FaultKind.LINK_LOSSY:
            link = HostLink(None, 0.0, fault.amount)
    return LinkChanged(stack, fault.target, link, fault.lasts_s)
