"""Record of a run of `baton up`, for other commands, also after the run."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from baton.client.channel import admin_token_file
from baton.launch import CommandFailed
from baton.launch.log_files import newest_first
from baton.launch.ports import claimant_of
from baton.process.private_files import private_folder, write_private
from baton.process.security.cluster_secret import ClusterSecret, new_secret

KEPT_RUNS = 5
PATTERN = "run-*.json"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Addresses, files and redacted settings of a run; it contains no secret."""

    pid: int  # pid of `baton up`
    admin_targets: tuple[str, ...]  # admin host:port of each router
    http_targets: tuple[str, ...]  # HTTP host:port of each router
    log_folder: str
    trace_file: str
    flags: Mapping[str, Mapping[str, str]]  # values of flags, by process and flag
    variables: Mapping[str, str]
    targets: tuple[str, ...] = ()  # gRPC host:port of each router


def write_run_record(runtime: Path, port: int, record: RunRecord) -> Path:
    """Write a record and remove all but the newest KEPT_RUNS. Raises: OSError."""
    path = private_folder(runtime) / f"run-{port}.json"
    write_private(path, json.dumps(asdict(record), indent=1) + "\n")
    for old in newest_first(runtime.glob(PATTERN))[KEPT_RUNS:]:
        old.unlink(missing_ok=True)
    return path


def kept_secret(runtime: Path, port: int) -> str:
    """Return the cluster secret of all runs on a port. Raises: CommandFailed.

    Responses in an external Redis are signed with this secret, so later runs need the same secret.
    """
    file = runtime / f"secret-{port}"
    try:
        private_folder(runtime)
        if not file.exists():
            write_private(file, new_secret() + "\n")
        return file.read_text(encoding="ascii").strip()
    except OSError as error:
        raise CommandFailed(f"{file}: cannot keep the secret of the cluster: {error.strerror}") from error


def write_admin_tokens(secret: ClusterSecret, ports: Iterable[int]) -> None:
    """Write the tokens with which this user's clients may call the admin ports of a run. Raises: OSError; RuntimeError
    without a home folder.
    """
    for port in ports:
        file = admin_token_file(port)
        private_folder(file.parent)
        write_private(file, secret.admin_token(port) + "\n")


def remove_admin_tokens(ports: Iterable[int]) -> None:
    """Remove the tokens of these admin ports. Raises: OSError; RuntimeError without a home folder."""
    for port in ports:
        admin_token_file(port).unlink(missing_ok=True)


def newest_run(runtime: Path) -> RunRecord | None:
    """Return the newest run whose record can be read; None without one."""
    return next(_records(runtime), None)


def running_services(runtime: Path, claimant: Callable[[int], int | None] = claimant_of) -> list[RunRecord]:
    """Return the active runs, newest first. `claimant` returns the pid of the process that claims a port."""
    return [
        record
        for record in _records(runtime)
        if record.targets and claimant(int(record.targets[0].rpartition(":")[2])) == record.pid
    ]


def _records(runtime: Path) -> Iterator[RunRecord]:
    """Yield the run records that can be read, newest first."""
    for path in newest_first(runtime.glob(PATTERN)):
        try:
            yield _read(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            continue  # a record of another version, or an incomplete one


def _read(content: Mapping[str, Any]) -> RunRecord:
    """Parse a run record. Raises: TypeError if fields are missing or unknown."""
    fields: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in content.items()}
    return RunRecord(**fields)
