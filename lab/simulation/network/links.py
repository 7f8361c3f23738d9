"""Links between simulated processes: delays, partitions, and their effect on connections. Independent of gRPC.

Each direction between two processes is a link. Messages of one pipe arrive in order, messages of different pipes in any
order. A cut link delays its messages until it is healed; a long cut ends connections by keepalive.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from baton.lab.simulation.network.loop import SimulatedLoop, SimulatedProcess, State

GAP_S = 1e-6  # minimum time between the arrivals of two messages of a pipe


class SimulatedConnection(Protocol):
    """Call in progress between two processes."""

    @property
    def ends(self) -> tuple[SimulatedProcess, SimulatedProcess | None]:
        """Return caller and server. The server is None until the call has arrived."""

    @property
    def keepalive_s(self) -> float:
        """Maximum time that the other end may be silent before the connection ends."""

    def break_off(self, why: str) -> None:
        """Break the connection, with the reason `why`, for both ends."""

    def peer_died(self, dead: SimulatedProcess) -> None:
        """Report the death of `dead` to the surviving end, after the messages that `dead` had sent."""


@dataclass(slots=True)
class SimulatedWire:
    """Link from one process to another."""

    base_s: float
    jitter_s: float
    cut: bool = False
    held: list[Callable[[], None]] = field(default_factory=list)


class Pipe:
    """Ordered messages of one call in one direction."""

    def __init__(self, network: "Network", sender: str, receiver: str) -> None:
        self._network = network
        self._link = network.link(sender, receiver)
        self._last_s = 0.0

    @property
    def cut(self) -> bool:
        return self._link.cut

    def send(self, arrive: Callable[[], None]) -> None:
        """Send a message: `arrive` is called on its arrival."""
        network, link = self._network, self._link
        delay_s = link.base_s + link.jitter_s * network.draw.random() ** 3
        self._last_s = max(self._last_s + GAP_S, network.loop.time() + delay_s)
        network.loop.call_at(self._last_s, self._arrive, arrive, context=network.process.context)

    def _arrive(self, arrive: Callable[[], None]) -> None:
        if self._link.cut:
            self._link.held.append(arrive)
        else:
            arrive()


class Network:
    """All links between processes, and the calls that run over them."""

    def __init__(self, loop: SimulatedLoop, draw: random.Random, base_s: float, jitter_s: float) -> None:
        self.loop = loop
        self.draw = draw
        self.process = SimulatedProcess("network")
        self._base_s, self._jitter_s = base_s, jitter_s
        self._links: dict[tuple[str, str], SimulatedWire] = {}
        self._connections: dict[SimulatedConnection, None] = {}  # the keys are used as an ordered set
        self.gone: set[str] = set()
        """Vanished hosts, whose kernel does not answer."""
        self.cuts_felt = 0
        """Number of messages that cut links have held."""

    def link(self, sender: str, receiver: str) -> SimulatedWire:
        link = self._links.get((sender, receiver))
        if link is None:
            link = self._links[sender, receiver] = SimulatedWire(self._base_s, self._jitter_s)
        return link

    def silent(self, one: str, other: str) -> bool:
        """Return whether `one` gets no answers from `other`: a link between them is cut, or machine `other` is gone."""
        return other in self.gone or self.link(one, other).cut or self.link(other, one).cut

    def opened(self, connection: SimulatedConnection) -> None:
        self._connections[connection] = None

    def closed(self, connection: SimulatedConnection) -> None:
        self._connections.pop(connection, None)

    def cut(self, sender: str, receiver: str) -> None:
        """Deliver nothing from `sender` to `receiver` until `heal`. A cut of more than keepalive ends connections."""
        link = self.link(sender, receiver)
        if link.cut:
            return
        link.cut = True
        for connection in self._between(sender, receiver):
            self._watch(connection, lambda: link.cut)

    def heal(self, sender: str, receiver: str) -> None:
        """End a cut, and deliver the messages that it has held."""
        link = self.link(sender, receiver)
        link.cut = False
        held, link.held = deque(link.held), []
        self.cuts_felt += len(held)
        while held:
            held.popleft()()

    def heal_all(self) -> None:
        for sender, receiver in self._links:
            self.heal(sender, receiver)

    def slow_down(self, sender: str, receiver: str, factor: float) -> None:
        link = self.link(sender, receiver)
        link.base_s, link.jitter_s = self._base_s * factor, self._jitter_s * factor

    def break_between(self, one: str, other: str, why: str) -> None:
        """Break every connection between two processes."""
        for connection in self._between(one, other):
            connection.break_off(why)

    def process_died(self, process: SimulatedProcess, peers_notice: bool) -> None:
        """End the connections of a dead process. `peers_notice`: its kernel closes them immediately; otherwise its
        machine is gone, and the peers time out.
        """
        if not peers_notice:
            self.gone.add(process.name)
        for connection in self._of(process):
            if peers_notice:
                connection.peer_died(process)
            else:
                self._watch(connection, lambda: True)

    def process_hangs(self, process: SimulatedProcess) -> None:
        """End the connections of a hanging process by keepalive, unless it continues in time."""
        for connection in self._of(process):
            self._watch(connection, lambda: process.state is State.HANGS)

    def _watch(self, connection: SimulatedConnection, silent: Callable[[], bool]) -> None:
        """End the connection by keepalive if `silent` is true after about `keepalive_s`."""
        patience_s = connection.keepalive_s * self.draw.uniform(0.5, 1.1)
        self.loop.call_later(patience_s, _give_up, connection, silent, context=self.process.context)

    def _between(self, one: str, other: str) -> list[SimulatedConnection]:
        return [connection for connection in self._connections if _names(connection) == {one, other}]

    def _of(self, process: SimulatedProcess) -> list[SimulatedConnection]:
        return [connection for connection in self._connections if process in connection.ends]


def _give_up(connection: SimulatedConnection, silent: Callable[[], bool]) -> None:
    if silent():
        connection.break_off("keepalive")


def _names(connection: SimulatedConnection) -> set[str]:
    caller, server = connection.ends
    return {caller.name, server.name} if server is not None else {caller.name}
