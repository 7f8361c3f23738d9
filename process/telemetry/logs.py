"""Logging to stderr, plain or JSON; each line has the trace and request of the task that logs."""

import json
import logging
import math
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal

from baton.process.foreign_text import shown
from baton.process.telemetry.trace_context import current_request_id, current_trace


def configure_logging(process: str, log_format: Literal["plain", "json"], level: str = "info") -> None:
    """Configure logging once, in `__main__`. `process`: name of this process in each line, for example `router` or
    `decode-0`.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_add_trace)
    handler.setFormatter(JsonFormatter(process) if log_format == "json" else PlainFormatter(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class SeldomLog:
    """Logger of warnings about foreign input: at most one of each kind per PERIOD_S, so that the log stays small."""

    PERIOD_S = 10.0
    KINDS = 256

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._kinds: dict[str, tuple[float, int]] = {}  # last warning's time and later dropped ones, by kind

    def warning(self, kind: str, message: str, *arguments: object) -> None:
        now = self._clock()
        written_s, left_out = self._kinds.get(kind, (-math.inf, 0))
        if now - written_s < self.PERIOD_S:
            self._kinds[kind] = (written_s, left_out + 1)
            return
        if kind not in self._kinds and len(self._kinds) >= self.KINDS:
            self._kinds.clear()
        self._kinds[kind] = (now, 0)
        more = f" (and {left_out} like it)" if left_out else ""
        self._logger.warning(message + "%s", *arguments, more)


class PlainFormatter(logging.Formatter):
    """Formatter of lines such as `12:00:00.123 INFO router server: SIGTERM: draining trace=... request=...`"""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s.%(msecs)03d %(levelname)s {process} %(name)s: %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        return shown(line + "".join(f" {name}={value}" for name, value in _identifiers(record).items()))

    def formatException(self, ei: Any) -> str:
        """Format a traceback with escapes for control characters, except line ends."""
        return shown(super().formatException(ei), keeps="\n")


class JsonFormatter(logging.Formatter):
    """Formatter of one JSON object per line; `trace_id` and `request_id` only if there are any."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),  # noqa: TID251 -- label
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **_identifiers(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def _add_trace(record: logging.LogRecord) -> bool:
    """Attach trace id and request id of the current task to a log record."""
    trace = current_trace.get()
    record.identifiers = {
        **({"trace_id": trace.trace_id} if trace else {}),
        **({"request_id": request_id} if (request_id := current_request_id.get()) else {}),
    }
    return True


def _identifiers(record: logging.LogRecord) -> dict[str, str]:
    identifiers: dict[str, str] = getattr(record, "identifiers", {})
    return identifiers
