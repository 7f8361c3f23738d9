"""The events of a run, in order, to examine a failed seed; and a digest, which two runs of a seed share."""

import hashlib
import logging
from collections import deque
from collections.abc import Callable

KEPT = 120  # of the last events


class Trace:
    """`show` is called with every line; None where no output is wanted."""

    def __init__(self, now: Callable[[], float], show: Callable[[str], None] | None = None) -> None:
        self._now = now
        self._show = show
        self._digest = hashlib.sha256()
        self.last: deque[str] = deque(maxlen=KEPT)
        self.shouts: list[str] = []
        """Our code's log lines of level error."""
        self.retried: list[str] = []
        """A router's log lines of attempts that failed."""

    def note(self, who: str, what: str) -> None:
        line = f"{self._now() - 1000.0:9.4f} {who:<10} {what}"
        self._digest.update(line.encode())
        self.last.append(line)
        if self._show is not None:
            self._show(line)

    def close(self) -> None:
        """Lets go of its world."""
        self._now, self._show = _never, None

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()[:16]


def _never() -> float:
    return 0.0


class TraceHandler(logging.Handler):
    """Log records become events; errors are remembered apart."""

    def __init__(self, trace: Trace, who: Callable[[], str]) -> None:
        super().__init__()
        self._trace = trace
        self._who = who
        self._formatter = logging.Formatter("%(name)s: %(message)s")

    def emit(self, record: logging.LogRecord) -> None:
        who, line = self._who(), self._formatter.format(record)
        if record.levelno >= logging.ERROR:
            self._trace.shouts.append(f"{who}: {line}")
        else:
            line = line.splitlines()[0]
        if record.name == "router.recovery":
            self._trace.retried.append(line)
        self._trace.note(who, line)
