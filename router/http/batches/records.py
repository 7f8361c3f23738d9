"""Descriptions of files and batches, as they are stored and as OpenAI's API shows them. Pure."""

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

WINDOW_S = 86_400
"""Time within which a batch is answered, in seconds: OpenAI's only completion window, 24 hours."""
VALIDATING, IN_PROGRESS, FINALIZING, CANCELLING = "validating", "in_progress", "finalizing", "cancelling"
COMPLETED, FAILED, EXPIRED, CANCELLED = "completed", "failed", "expired", "cancelled"
FINAL = frozenset((COMPLETED, FAILED, EXPIRED, CANCELLED))
_STATUSES = (IN_PROGRESS, FINALIZING, COMPLETED, FAILED, EXPIRED, CANCELLING, CANCELLED)
FILE, BATCH = "file-", "batch_"
_ID = re.compile(r"(file-|batch_)[0-9a-f]{32}")


def new_id(prefix: str, now_s: float) -> str:
    """Return a new id. Ids are ordered by the time of their creation."""
    return f"{prefix}{int(now_s * 1000):012x}{secrets.token_hex(10)}"


def is_id(text: str, prefix: str) -> bool:
    """Return whether a text has the form of an id. Only such a text may become part of a path."""
    return text.startswith(prefix) and _ID.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class StoredFile:
    """Description of a file. `bytes`: size of the content. `expires_at`: seconds since 1970."""

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str

    @property
    def shown(self) -> dict[str, Any]:
        return {"object": "file", **asdict(self), "status": "processed", "status_details": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBatch:
    """Description of a batch. `tenant`: owner, from which the router finds the limits of its API key again.

    `times`: seconds since 1970 at which the batch got each status. `outcome`: final status, known before the results
    are published; empty until then.
    """

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    results_ttl_s: float
    metadata: Mapping[str, str] | None = None
    status: str = VALIDATING
    outcome: str = ""
    times: Mapping[str, int] = field(default_factory=dict)
    model: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    errors: Sequence[Mapping[str, Any]] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def is_final(self) -> bool:
        return self.status in FINAL

    def moved(self, status: str, now_s: float, **changes: Any) -> "StoredBatch":
        """Return the batch with another status, and the time at which it got it."""
        return replace(self, status=status, times={**self.times, status: int(now_s)}, **changes)

    @property
    def shown(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": {"object": "list", "data": list(self.errors)} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": "24h",
            "status": self.status,
            "output_file_id": self.output_file_id if self.is_final else None,
            "error_file_id": self.error_file_id if self.is_final else None,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{status}_at": self.times.get(status) for status in _STATUSES},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }
