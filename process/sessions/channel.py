"""Channel end: reliable numbered delivery over connections that break. Symmetrical, pure; knows no transport or clock.

Each direction is numbered from 1. A sent message is kept until the other end acknowledges it; after a reconnect the
kept ones are sent again, in order, and the receiver drops those that it has. So every message is delivered once, in
order, as long as both ends keep their channel.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, TypeVar

Message = TypeVar("Message")


class Received(Enum):
    FRESH = auto()
    """The next one: act on it."""
    DUPLICATE = auto()
    """Sent again after a reconnect: drop it."""
    GAP = auto()
    """Missing message: the connection is broken beyond repair, close it and reconnect."""


@dataclass(frozen=True, slots=True)
class Numbered(Generic[Message]):
    number: int
    message: Message


class SessionOverflow(Exception):
    """The other end has not acknowledged for too long; the session must be dropped and its requests aborted."""


class SessionViolation(Exception):
    """The other end acknowledged a number that was never sent."""


class SessionChannel(Generic[Message]):
    """The state of one end: its own unacknowledged messages, and the highest number it received."""

    def __init__(self, max_unacknowledged: int) -> None:
        self._max_unacknowledged = max_unacknowledged
        self._outgoing: deque[Numbered[Message]] = deque()
        self._last_sent = 0
        self._last_received = 0

    @property
    def last_received(self) -> int:
        """Highest number received with all below it, to be acknowledged; 0 before the first."""
        return self._last_received

    def number(self, message: Message) -> int:
        """Keep a message for sending and return its number.

        Raises SessionOverflow when `max_unacknowledged` are kept already; the message is then not taken.
        """
        if len(self._outgoing) >= self._max_unacknowledged:
            raise SessionOverflow(f"{len(self._outgoing)} messages are not acknowledged")
        self._last_sent += 1
        self._outgoing.append(Numbered(self._last_sent, message))
        return self._last_sent

    def acknowledge(self, number: int) -> None:
        """Forget the messages up to `number`; an old acknowledgement changes nothing. Raises SessionViolation."""
        if number > self._last_sent:
            raise SessionViolation(f"{number} was acknowledged, the last one sent is {self._last_sent}")
        while self._outgoing and self._outgoing[0].number <= number:
            self._outgoing.popleft()

    def receive(self, number: int) -> Received:
        """Judge an arriving number (from 1). Only FRESH changes the channel."""
        if number <= self._last_received:
            return Received.DUPLICATE
        if number > self._last_received + 1:
            return Received.GAP
        self._last_received = number
        return Received.FRESH

    def unacknowledged(self) -> Iterator[Numbered[Message]]:
        """Messages to resend after a reconnect, oldest first; a snapshot, so that the channel may change meanwhile."""
        return iter(tuple(self._outgoing))

    @property
    def unacknowledged_count(self) -> int:
        return len(self._outgoing)
