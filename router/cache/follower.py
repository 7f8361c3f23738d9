"""Progress of copying a worker's state: first a snapshot, then every numbered change in order. Pure state."""

from dataclasses import dataclass

ASK_AGAIN_S = 1.0
"""Minimum time between two requests for a snapshot."""
BEHIND_S = 1.0
"""Time within which announced changes must arrive: a report may come slightly before the changes that it announces."""


@dataclass(slots=True)
class ChangeFollower:
    """Progress in applying one worker's changes. `sequence`: number of the last applied change."""

    follows: bool = False
    sequence: int = 0
    asked_s: float | None = None  # time of the last request for a snapshot
    behind_s: float | None = None  # time at which an announced change was first found missing

    def is_ignored(self, sequence: int) -> bool:
        """Return whether the change is already applied, or will be part of the snapshot that is awaited."""
        return not self.follows or sequence <= self.sequence

    def applied(self, sequence: int) -> None:
        self.sequence, self.behind_s = sequence, None

    def is_behind(self, announced: int, now: float) -> bool:
        """Return whether change `announced` has been missing for more than BEHIND_S."""
        if announced <= self.sequence:
            return False
        self.behind_s = now if self.behind_s is None else self.behind_s
        return now - self.behind_s > BEHIND_S

    def restart(self, now: float) -> bool:
        """Ignore changes until the next snapshot. Return whether to request it; true at most once per ASK_AGAIN_S."""
        self.follows, self.behind_s = False, None
        if self.asked_s is not None and now - self.asked_s <= ASK_AGAIN_S:
            return False
        self.asked_s = now
        return True
