"""Collect machine, configuration, status, recent requests and logs, redacted, in an archive (`baton bundle`)."""

import io
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from baton.cli.bundle.decided import FixedNames, decided_record
from baton.cli.bundle.log_lines import safe_lines, tail
from baton.cli.bundle.machine import describe_machine
from baton.cli.bundle.processes import PROC, BatonProcess, admin_targets, find_processes
from baton.cli.bundle.redaction import Redactor, redactor_for, shown_flags, shown_variables
from baton.cli.connection import admin_client
from baton.client import AdminClient
from baton.client.timelines import ProcessTimeline
from baton.launch import CommandFailed
from baton.launch.log_files import PATTERN, newest_first
from baton.launch.paths import RUNTIME
from baton.launch.run_record import RunRecord, newest_run
from baton.process.private_files import older

README = "README.txt"
MAX_FILE_BYTES = 8 << 20
LOG_BYTES = 512 << 10  # bytes that are kept from the end of each process's log
MAX_REQUESTS = 256  # maximum number of newest requests per router
CALL_S = 3.0
RECORD_MS = 3_600_000  # period of record.json; processes keep less of it, in bounded memory
RECORD_CALL_S = 30.0
ABOUT = """\
A bug report of Baton, written by `baton bundle` at {made:%Y-%m-%d %H:%M:%S} UTC.

Files:
{files}

Missing, and why:
{missing}

`baton replay` reads record.json: lengths, settings and times of the newest requests and steps; equal blocks of prompts
have equal numbers, which say nothing of their content.

{prompts} API keys and their hashes, certificates and their keys, headers, users and
passwords in URLs, and every setting and log line that is not on a list of harmless ones. Request ids, which clients may
choose, are included. The home folder is written as `~`. Read it before you send it.
"""
WITHOUT_TOKENS = "Left out on purpose: prompts and answers,"
WITH_TOKENS = "PROMPTS AND ANSWERS ARE IN IT, as token ids, since --with-tokens was given. Left out on purpose:"
_WORD = re.compile(r"[\w.:/@+-]{0,160}")
_DETAIL = re.compile(r"[\w.:/@+-]{0,160}( [\w.:/@+-]{1,160})?")


@dataclass(frozen=True, slots=True)
class Sources:
    """Sources from which a bundle is collected."""

    runtime: Path
    run: RunRecord | None  # last run of `baton up`, running or not
    processes: Sequence[BatonProcess]
    admin_targets: Sequence[str]
    environment: Mapping[str, str] = field(repr=False)  # environment of this command
    with_tokens: bool = False  # record.json has the token ids that routers keep


@dataclass(frozen=True, slots=True)
class Missing:
    """Reason why a file cannot be collected."""

    reason: str


Fetched = TypeVar("Fetched")
Part = Callable[[Sources], Iterator[tuple[str, object]]]
"""Function that yields names of files with their content: text, JSON, or a Missing."""


def machine(sources: Sources) -> Iterator[tuple[str, object]]:
    yield "machine.json", describe_machine()


def configuration(sources: Sources) -> Iterator[tuple[str, object]]:
    """Yield the settings of running processes, of the last `baton up` (even if it has exited), and of this shell."""
    running = [
        {
            "name": each.name,
            "pid": each.pid,
            "module": each.module,
            "flags": shown_flags(each.arguments),
            "variables": None if each.environment is None else shown_variables(each.environment),
        }
        for each in sources.processes
    ]
    run = sources.run
    last = None if run is None else {"flags": run.flags, "variables": run.variables, "pid_of_up": run.pid}
    shell = shown_variables(sources.environment)
    yield "configuration.json", {"running": running, "last_run_of_up": last, "variables_of_this_shell": shell}
    if run is None:
        yield "the last run", Missing("no run of `baton up` is recorded here")


def routers(sources: Sources) -> Iterator[tuple[str, object]]:
    """Yield the status and the newest requests of each router."""
    for number, target in enumerate(sources.admin_targets):
        yield f"status-{number}.json", _fetched(target, lambda admin: asdict(admin.status()))
        yield f"requests-{number}.json", _fetched(target, _newest_requests)


def _newest_requests(admin: AdminClient) -> object:
    return [safe_texts(asdict(each)) for each in admin.recent_requests(limit=MAX_REQUESTS)]


def _fetched(target: str, fetch: Callable[[AdminClient], Fetched]) -> Fetched | Missing:
    try:
        with admin_client(target, CALL_S) as admin:
            return fetch(admin)
    except CommandFailed as error:
        return Missing(str(error))


def record(sources: Sources) -> Iterator[tuple[str, object]]:
    """Yield what decided about the newest requests and steps, of all routers and their workers."""
    found = [_fetched(target, partial(_timelines, sources.with_tokens)) for target in sources.admin_targets]
    timelines = [each for each in found if not isinstance(each, Missing)]
    yield from (("record.json", each) for each in found if isinstance(each, Missing))
    if timelines:
        yield "record.json", FixedNames(safe_texts(decided_record(timelines, MAX_FILE_BYTES, sources.with_tokens)))


def _timelines(with_tokens: bool, admin: AdminClient) -> Sequence[ProcessTimeline]:
    return admin.timelines(last_ms=RECORD_MS, with_inputs=True, with_tokens=with_tokens, timeout_s=RECORD_CALL_S)


def safe_texts(value: Any, name: str = "") -> Any:
    """Return a JSON value in which each text with more than one word is replaced by "", since it may be secret."""
    if isinstance(value, dict):
        return {key: safe_texts(each, key) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [safe_texts(each, name) for each in value]
    if isinstance(value, str):
        return value if (_DETAIL if name == "detail" else _WORD).fullmatch(value) else ""
    return value


def logs(sources: Sources) -> Iterator[tuple[str, object]]:
    """Yield the last run's logs, a file per process."""
    folders = newest_first(sources.runtime.glob(PATTERN))
    if sources.run is not None and Path(sources.run.log_folder).is_dir():
        folders = [Path(sources.run.log_folder)]
    files = sorted(folders[0].glob("*.log")) if folders else []
    if not files:
        yield "logs", Missing("no run of `baton up` has written any; containers keep theirs: docker compose logs")
    for path in files:
        try:
            content: object = "".join(f"{line}\n" for line in safe_lines(_last_lines(path)))
        except OSError as error:
            content = Missing(error.strerror or type(error).__name__)
        yield f"logs/{path.name}", content


def _last_lines(path: Path) -> Sequence[str]:
    """Return a log's last lines, up to LOG_BYTES; if the log is shorter, lines of the older file come first.

    Raises: OSError.
    """
    lines = tail(path, LOG_BYTES)
    room = LOG_BYTES - sum(map(len, lines))
    return [*(tail(older(path), room) if room > 0 and older(path).is_file() else []), *lines]


PARTS: tuple[Part, ...] = (machine, configuration, routers, record, logs)


@dataclass(frozen=True, slots=True)
class Bundle:
    files: Mapping[str, bytes]
    missing: Sequence[str]


def collect(parts: Sequence[Part], sources: Sources, redactor: Redactor) -> Bundle:
    """Collect all parts of the bundle; a part that fails is listed as missing."""
    files: dict[str, bytes] = {}
    missing: list[str] = []
    for part in parts:
        try:
            for name, content in part(sources):
                if isinstance(content, Missing):
                    missing.append(redactor.clean(f"{name}: {content.reason}"))
                else:
                    files[name] = _bytes_of(content, redactor)
        except Exception as error:  # noqa: BLE001 -- a defect in one part must not cost the others; its text may be secret
            missing.append(f"{part.__name__}: {type(error).__name__} while collecting, a defect of Baton")
    return Bundle(files, missing)


def _bytes_of(content: object, redactor: Redactor) -> bytes:
    if isinstance(content, FixedNames):
        return content.cleaned(redactor.clean)
    text = content if isinstance(content, str) else json.dumps(content, indent=1, default=str) + "\n"
    data = redactor.clean(text).encode(errors="replace")
    return data if len(data) <= MAX_FILE_BYTES else data[:MAX_FILE_BYTES] + b"\n[truncated]\n"


def write_archive(bundle: Bundle, out: Path, made: datetime, with_tokens: bool = False) -> None:
    """Write a tar.gz that only its owner may read, complete or not at all. Raises: CommandFailed."""
    folder = out.name.removesuffix(".gz").removesuffix(".tar").removesuffix(".tgz") or "baton-bundle"
    listed = "\n".join(f"  {name} ({len(data):,} bytes)" for name, data in bundle.files.items())
    missing = "\n".join(f"  {each}" for each in bundle.missing) or "  nothing"
    content = WITH_TOKENS if with_tokens else WITHOUT_TOKENS
    readme = ABOUT.format(made=made, files=listed, missing=missing, prompts=content).encode()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, data in ({README: readme} | dict(bundle.files)).items():
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size, entry.mtime, entry.mode = len(data), int(made.timestamp()), 0o644
            archive.addfile(entry, io.BytesIO(data))
    unfinished = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        unfinished.touch(mode=0o600)
        unfinished.write_bytes(packed.getvalue())
        unfinished.replace(out)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise CommandFailed(f"{out}: cannot write the bundle: {error.strerror}") from error


def make_bundle(
    out: Path | None,
    admin: Sequence[str] = (),
    runtime: Path = RUNTIME,
    proc: Path = PROC,
    with_tokens: bool = False,
) -> int:
    """Write the archive, by default baton-bundle-TIME.tar.gz in the current folder. Raises: CommandFailed."""
    made = datetime.now(UTC)  # noqa: TID251 -- for the bundle's reader
    path = out if out is not None else Path(f"baton-bundle-{made:%Y%m%d-%H%M%S}.tar.gz")
    processes, run = find_processes(proc), newest_run(runtime)
    sources = Sources(runtime, run, processes, admin or admin_targets(processes, run), os.environ, with_tokens)
    environments = (sources.environment, *(each.environment or {} for each in processes))
    bundle = collect(PARTS, sources, redactor_for(environments, Path.home()))
    write_archive(bundle, path, made, with_tokens)
    print(f"{path}: {len(bundle.files)} files, {path.stat().st_size:,} bytes; README.txt in it lists them")
    for each in bundle.missing:
        print(f"  missing: {each}")
    shown = "prompts and answers, as token ids, but no" if with_tokens else "no prompts, answers,"
    print(f"It has {shown} keys or passwords. Read it before you send it.")
    return 0
