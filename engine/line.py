"""Sequences in order of their turn, not of their arrival here."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar


class Turn(NamedTuple):
    """Place in line: older requests first, and a request's choices in order."""

    arrival: int
    choice: int


class HasTurn(Protocol):
    @property
    def turn(self) -> Turn: ...


Member = TypeVar("Member", bound=HasTurn)


class Line(Generic[Member]):
    """Each turn at most once. Finding a place takes the logarithm of the length."""

    def __init__(self) -> None:
        self._turns: list[Turn] = []
        self._members: dict[Turn, Member] = {}

    def add(self, member: Member) -> None:
        """Raises: ValueError for a turn that is here already."""
        if member.turn in self._members:
            raise ValueError(f"{member.turn} is in line already")
        self._members[member.turn] = member
        insort(self._turns, member.turn)

    def remove(self, member: Member) -> None:
        """Raises: KeyError for one that is not here."""
        del self._members[member.turn]
        del self._turns[bisect_left(self._turns, member.turn)]

    @property
    def oldest(self) -> Member:
        return self._members[self._turns[0]]

    @property
    def newest(self) -> Member:
        return self._members[self._turns[-1]]

    def __contains__(self, member: HasTurn) -> bool:
        return member.turn in self._members

    def __iter__(self) -> Iterator[Member]:
        """The oldest first; the line may not change meanwhile."""
        return map(self._members.__getitem__, self._turns)

    def __len__(self) -> int:
        return len(self._turns)
