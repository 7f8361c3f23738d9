"""One worker, as the registry or a fixed list describes it. Plain values."""

import json
from dataclasses import asdict, dataclass
from enum import StrEnum


class WorkerRole(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """`epoch` and `fingerprint` are None where the worker is only in a fixed list: its session reports them."""

    worker_id: str
    role: WorkerRole
    endpoint: str  # host:port of the internal server
    epoch: int | None = None  # of two processes with one worker_id, the higher is the living one
    fingerprint: str | None = None  # hex; only workers of one fingerprint pair

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> "WorkerRecord":
        """Raises ValueError for anything that is not a record; fields of later versions are ignored."""
        try:
            fields = json.loads(text)
            return WorkerRecord(
                worker_id=str(fields["worker_id"]),
                role=WorkerRole(fields["role"]),
                endpoint=str(fields["endpoint"]),
                epoch=int(fields["epoch"]),
                fingerprint=str(fields["fingerprint"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a worker record: {error}") from error


def parse_workers(text: str) -> tuple[WorkerRecord, ...]:
    """Workers from `prefill@host:port,decode@host:port`; they are called by role and endpoint. Raises ValueError."""
    workers = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        role, at, endpoint = part.partition("@")
        host, colon, port = endpoint.rpartition(":")
        if role not in (*WorkerRole,) or not (at and host and colon and port.isdecimal()):
            raise ValueError(f"{part!r} is not of the form prefill@host:port or decode@host:port")
        workers.append(WorkerRecord(worker_id=part, role=WorkerRole(role), endpoint=endpoint))
    return tuple(workers)
