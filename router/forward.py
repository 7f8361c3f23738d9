"""Forward progress: a worker that has work and takes no step is given no more, however well it reports. Pure."""

from router.worker import WorkerReport

STALLED_S = 15.0
"""Longer than any step, and less than a worker's own watchdog waits (30 s), which ends its process."""


class ForwardProgress:
    """Of one worker, by its reports."""

    __slots__ = ("_since_s", "_steps")

    def __init__(self) -> None:
        self._steps: int | None = None
        self._since_s = 0.0

    def stalls(self, report: WorkerReport, now: float) -> bool:
        """Whether it has had work since `STALLED_S` and taken no step. The next step takes that back."""
        has_work = report.running_sequences or report.pending_tokens or report.waiting_requests
        if not has_work or report.steps != self._steps:
            self._steps, self._since_s = report.steps, now
        return now - self._since_s > STALLED_S
