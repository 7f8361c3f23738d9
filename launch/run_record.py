"""Record of a run of `baton up`, for later commands, also after it has ended or died."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from baton.client.channel import admin_token_file
from baton.launch.log_files import newest_first
from baton.launch.ports import claimant_of
from baton.process.private_files import private_folder, write_private
from baton.process.security.cluster_secret import ClusterSecret, new_secret

KEPT_RUNS = 5
PATTERN = "run-*.json"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Holds no secret: `flags` and `variables` are what may be shown of them."""

    pid: int  # of `up`
    admin_targets: tuple[str, ...]  # host:port, of each router
    http_targets: tuple[str, ...]  # host:port, of each router
    log_folder: str
    trace_file: str
    flags: Mapping[str, Mapping[str, str]]  # by process, by flag
    variables: Mapping[str, str]
    targets: tuple[str, ...] = ()  # host:port of gRPC, of each router


def write_run_record(runtime: Path, port: int, record: RunRecord) -> Path:
    """Removes the records of all but the newest few runs. Raises: OSError."""
    path = private_folder(runtime) / f"run-{port}.json"
    write_private(path, json.dumps(asdict(record), indent=1) + "\n")
    for old in newest_first(runtime.glob(PATTERN))[KEPT_RUNS:]:
        old.unlink(missing_ok=True)
    return path


def kept_secret(runtime: Path, port: int) -> str:
    """The same for all runs on that port. Raises: OSError."""
    file = private_folder(runtime) / f"secret-{port}"
    if not file.exists():
        write_private(file, new_secret() + "\n")
    return file.read_text(encoding="ascii").strip()


def write_admin_tokens(secret: ClusterSecret, ports: Iterable[int]) -> None:
    """Open the admin ports of a run to the clients of this user. Raises: OSError, RuntimeError without a home."""
    for port in ports:
        file = admin_token_file(port)
        private_folder(file.parent)
        write_private(file, secret.admin_token(port) + "\n")


def remove_admin_tokens(ports: Iterable[int]) -> None:
    """Remove the tokens. Raises: OSError, RuntimeError."""
    for port in ports:
        admin_token_file(port).unlink(missing_ok=True)


def newest_run(runtime: Path) -> RunRecord | None:
    """Return the newest run; None before the first, or if its record cannot be read."""
    return next(_records(runtime), None)


def running_services(runtime: Path, claimant: Callable[[int], int | None] = claimant_of) -> list[RunRecord]:
    """The runs that have not ended, the newest first. `claimant`: the process that claims a port, see ports.py."""
    return [
        record
        for record in _records(runtime)
        if record.targets and claimant(int(record.targets[0].rpartition(":")[2])) == record.pid
    ]


def _records(runtime: Path) -> Iterator[RunRecord]:
    """The newest first."""
    for path in newest_first(runtime.glob(PATTERN)):
        try:
            yield _read(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # of another version, or half written: the run before it is better than nothing


def _read(content: Mapping[str, Any]) -> RunRecord:
    """Parse a record. Raises: KeyError, TypeError, ValueError."""
    return RunRecord(
        pid=int(content["pid"]),
        admin_targets=tuple(map(str, content["admin_targets"])),
        http_targets=tuple(map(str, content["http_targets"])),
        log_folder=str(content["log_folder"]),
        trace_file=str(content["trace_file"]),
        flags={str(name): dict(flags) for name, flags in content["flags"].items()},
        variables=dict(content["variables"]),
        targets=tuple(map(str, content.get("targets", ()))),
    )
