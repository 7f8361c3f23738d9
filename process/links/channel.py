"""One end of a link: numbered messages, delivered once and in order over connections that break. Pure.

Messages of each direction are numbered from 1. The sender keeps a message until the other end acknowledges it. After a
reconnect, the sender repeats the kept messages in order, and the receiver drops duplicates. Both ends use this class.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, TypeVar

Message = TypeVar("Message")


class Received(Enum):
    FRESH = auto()
    """Next message: process it."""
    DUPLICATE = auto()
    """Repeated after a reconnect: drop it."""
    GAP = auto()
    """A message is missing: close the connection and reconnect."""


@dataclass(frozen=True, slots=True)
class Numbered(Generic[Message]):
    number: int
    message: Message


class LinkOverflow(Exception):
    """Error: too many messages are unacknowledged. The link must be closed and its requests aborted."""


class LinkViolation(Exception):
    """Error: the other end acknowledged a number that was never sent."""


class LinkChannel(Generic[Message]):
    """State of one end of a link: sent messages without acknowledgement, and the number of the last received one."""

    def __init__(self, max_unacknowledged: int) -> None:
        self._max_unacknowledged = max_unacknowledged
        self._outgoing: deque[Numbered[Message]] = deque()
        self._last_sent = 0
        self._last_received = 0

    @property
    def last_received(self) -> int:
        """Return the number of the last received message; 0 if none. All earlier messages were received too."""
        return self._last_received

    def number(self, message: Message) -> int:
        """Return the next number, for `message`. Keep the message until it is acknowledged.

        Raises: LinkOverflow if `max_unacknowledged` messages are kept already.
        """
        if len(self._outgoing) >= self._max_unacknowledged:
            raise LinkOverflow(f"{len(self._outgoing)} messages are not acknowledged")
        self._last_sent += 1
        self._outgoing.append(Numbered(self._last_sent, message))
        return self._last_sent

    def acknowledge(self, number: int) -> None:
        """Forget the messages up to `number`; an old acknowledgement changes nothing. Raises: LinkViolation."""
        if number > self._last_sent:
            raise LinkViolation(f"message {number} was acknowledged, but the last message sent is {self._last_sent}")
        while self._outgoing and self._outgoing[0].number <= number:
            self._outgoing.popleft()

    def receive(self, number: int) -> Received:
        """Classify the number of a received message. Only FRESH changes the channel."""
        if number <= self._last_received:
            return Received.DUPLICATE
        if number > self._last_received + 1:
            return Received.GAP
        self._last_received = number
        return Received.FRESH

    def unacknowledged(self) -> Iterator[Numbered[Message]]:
        """Return the messages to repeat after a reconnect, oldest first. Later changes do not affect the iterator."""
        return iter(tuple(self._outgoing))

    @property
    def unacknowledged_count(self) -> int:
        return len(self._outgoing)
