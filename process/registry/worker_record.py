"""Workers and adapters as the registry and command lines describe them. Plain values."""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from baton.process.foreign_text import ADAPTER_NAME, identifier_fault
from baton.process.wire_bounds import MAX_EXACT, endpoint, number
from baton.versions import OWN, announced

MOST_PROTOCOL = 1 << 16
MOST_LISTED = 256
"""Maximum number of adapters added while the cluster runs."""
MOST_GRACE_S = 3600.0
"""Maximum time that requests may continue with replaced weights."""
WEIGHTS = "=weights"
"""Name of replaced model weights in the list of adapters; no adapter may have it."""
_WEIGHTS_DIGEST = "weights:"
VERSION_CHARACTERS = 16
MAX_PATH_CHARACTERS = 4096


class WorkerRole(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """Record of a worker. For a worker from a fixed list, `epoch` and `fingerprint` are None: its link reports them.

    `epoch`: epoch in the registry. The link's epoch may be lower if the registry did not respond when the worker
    started.
    """

    worker_id: str
    role: WorkerRole
    endpoint: str  # host:port of the internal server
    epoch: int | None = None  # if two processes have one worker_id, the lower epoch is a zombie's
    fingerprint: str | None = None  # hex; only workers with equal fingerprints pair
    release: str = ""  # release of the worker; empty: older than 0.2.0
    protocol: int = 0  # newest supported protocol; 0: older than release 0.2.0
    oldest_protocol: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> "WorkerRecord":
        """Parse a record; fields of later versions are ignored. Raises: ValueError."""
        fields: Any = None
        try:
            fields = json.loads(text)
            record = WorkerRecord(
                worker_id=str(fields["worker_id"]),
                role=WorkerRole(fields["role"]),
                endpoint=str(fields["endpoint"]),
                epoch=int(fields["epoch"]),
                fingerprint=str(fields["fingerprint"]),
                release=str(fields.get("release", "")),
                protocol=int(fields.get("protocol", 0)),
                oldest_protocol=int(fields.get("oldest_protocol", 0)),
            )
            for name, fault in (
                ("worker_id", identifier_fault(record.worker_id) or (not record.worker_id and "is empty")),
                ("endpoint", endpoint(record.endpoint)),
                ("epoch", number()(record.epoch)),
                ("fingerprint", identifier_fault(record.fingerprint or "")),
                ("release", identifier_fault(record.release)),
                ("protocol", number(0, MOST_PROTOCOL)(max(record.protocol, record.oldest_protocol))),
            ):
                if fault:
                    raise ValueError(f"{name}: {fault}")
        except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
            raise ValueError(f"{_author(fields)}not a worker record: {error}") from error
        return record


def _author(fields: object) -> str:
    """Describe the worker that wrote an unreadable record, and its versions, for an error; empty if the record names
    none.
    """
    if not isinstance(fields, dict) or not isinstance(fields.get("worker_id"), str):
        return ""
    release, protocol = fields.get("release", ""), fields.get("protocol", 0)
    numbers = protocol if isinstance(protocol, int) else 0
    return f"{fields['worker_id']}, {announced(str(release), numbers)}, read by {OWN}: "


def parse_workers(text: str) -> tuple[WorkerRecord, ...]:
    """Parse fixed workers, `prefill@host:port,decode@host:port`. Each worker's text is also its id. Raises:
    ValueError.
    """
    workers = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        role, at, endpoint = part.partition("@")
        host, colon, port = endpoint.rpartition(":")
        if role not in (*WorkerRole,) or not (at and host and colon and port.isdecimal()):
            raise ValueError(f"{part!r} is not of the form prefill@host:port or decode@host:port")
        if ":" in host and not (host.startswith("[") and host.endswith("]")):
            raise ValueError(f"{part!r}: an IPv6 address must be in brackets, as in {role}@[{host}]:{port}")
        workers.append(WorkerRecord(worker_id=part, role=WorkerRole(role), endpoint=endpoint))
    return tuple(workers)


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """Adapter on a command line, `NAME=FOLDER`. The folder is not read."""

    name: str  # name in requests
    folder: Path

    def __str__(self) -> str:
        return f"{self.name}={self.folder}"


def weights_digest(checkpoint: bytes) -> str:
    """Return the digest of weights, in the format of an adapter's digest. `checkpoint`: digest of the checkpoint's
    files; empty if unknown.
    """
    return f"{_WEIGHTS_DIGEST}{checkpoint.hex()}" if checkpoint else ""


def is_weights(digest: str) -> bool:
    return digest.startswith(_WEIGHTS_DIGEST)


def version_of(digest: str) -> str:
    """Return the version of weights that responses report; equal for equal checkpoints, empty if unknown."""
    return digest.removeprefix(_WEIGHTS_DIGEST)[:VERSION_CHARACTERS]


class ListRank(NamedTuple):
    """Rank of an adapter list. All processes apply the list with the highest rank, so they agree even if two routers
    created different lists with the same version.
    """

    version: int = 0
    entries: tuple[tuple[str, str], ...] = ()  # names and digests


def list_rank(version: int, entries: Iterable[tuple[str, str]]) -> ListRank:
    return ListRank(version, tuple(sorted(entries)))


def newest_version() -> int:
    """Return the highest valid version of an adapter list: the clock in microseconds.

    The bound limits forged versions. The clock passes a forged version soon, so later changes can get a higher one.
    """
    return min(MAX_EXACT, time.time_ns() // 1000)  # noqa: TID251 -- bound far above any count of changes


def list_fault(version: int, entries: Sequence[tuple[str, str, str, float]]) -> str | None:
    """Return why an adapter list (names, digests, paths, graces) is invalid; None if it is valid."""
    if fault := number(0, newest_version())(version):
        return f"version: {fault}"
    if len(entries) > MOST_LISTED + 1:  # one more for the model's weights
        return f"at most {MOST_LISTED} adapters, not {len(entries)}"
    for name, digest, path, grace_s in entries:
        if name != WEIGHTS and not is_adapter_name(name):
            return "an adapter's name is invalid"
        if identifier_fault(digest) or not digest or len(path) > MAX_PATH_CHARACTERS or "\0" in path:
            return f"digest or path of {name} is invalid"
        if fault := number(0, MOST_GRACE_S)(grace_s):
            return f"grace_s of {name}: {fault}"
    return None


def is_adapter_name(name: str) -> bool:
    return ADAPTER_NAME.fullmatch(name) is not None


def parse_adapters(text: str | Sequence[str]) -> tuple[AdapterFolder, ...]:
    """Parse `NAME=FOLDER,NAME=FOLDER`, or a sequence of such pairs. Raises: ValueError."""
    parts = text.split(",") if isinstance(text, str) else text
    adapters: dict[str, AdapterFolder] = {}
    for part in filter(None, (part.strip() for part in parts)):
        name, equals, folder = part.partition("=")
        if not (equals and folder and is_adapter_name(name)):
            raise ValueError(f"{part!r} is not of the form NAME=FOLDER, with a name of letters, digits and _ . : / -")
        if name in adapters:
            raise ValueError(f"the name {name!r} is given twice")
        adapters[name] = AdapterFolder(name, Path(folder).expanduser())
    return tuple(adapters.values())
