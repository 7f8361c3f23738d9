"""How the sessions with a worker have ended: by death, drain, change of role, or for want of a connection. Pure."""

from dataclasses import dataclass
from enum import Enum, auto

from router.worker import WorkerDescription


class End(Enum):
    """What is known of the process at the other end of a session that was lost."""

    NONE = auto()  # none was lost
    ANNOUNCED = auto()  # it ends after a drain, or changes its role
    CUT = auto()  # it may live
    GONE = auto()


@dataclass(slots=True)
class Departures:
    """Counts since the router's start."""

    deaths: int = 0  # processes that were gone and had not drained, or had something open
    drains: int = 0  # processes that ended after they had drained
    role_changes: int = 0
    lost_sessions: int = 0  # of processes that may live: silence, or a connection that did not come back in time

    def lost(self, end: End, drained: bool) -> End:
        """A session was lost. Returns how its process ended, given that the worker had `drained`, or not."""
        if end is End.GONE:
            self._gone(drained)
        elif drained:
            return End.ANNOUNCED
        elif end is End.CUT:
            self.lost_sessions += 1
        return end

    def follow(self, end: End, before: WorkerDescription, now: WorkerDescription) -> None:
        """Another session begins, with a later epoch, after the last one came to this end."""
        if before.is_same_process(now):
            self.role_changes += before.role is not now.role
        elif end is not End.GONE:
            self._gone(end is End.ANNOUNCED)

    def _gone(self, drained: bool) -> None:
        if drained:
            self.drains += 1
        else:
            self.deaths += 1
