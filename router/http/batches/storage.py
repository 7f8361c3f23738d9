"""Folder of files and batches, which the routers of one machine may share. All methods block: call them on a thread.

FOLDER/OWNER/files/ID           content of a file
FOLDER/OWNER/files/ID.json      its description, written after the content
FOLDER/OWNER/batches/ID.json    description of a batch
FOLDER/OWNER/running/ID/        an unfinished batch (held.py)

A description is replaced atomically. Times are times of day, since files and batches outlive every process.
"""

import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from baton.router.http.batches.records import BATCH, CANCELLING, FILE, WINDOW_S, StoredBatch, StoredFile, is_id, new_id
from baton.router.http.edge.problem import Problem
from baton.router.http.responses.store import owner_of

BATCH_PURPOSE, RESULT_PURPOSE = "batch", "batch_output"
MAX_UNFINISHED = 64
"""Maximum number of unfinished batches per API key."""
_ENTRY_BYTES = 16 << 10  # least size that a file counts, so that the number of files is bounded too
_PART = ".part"  # suffix of a file that is being written
REQUESTS = "requests"
REQUESTS_PART = f"{REQUESTS}{_PART}"
_MAX_UPLOAD_S = 86_400.0  # age from which an unfinished upload is removed
_MODE = 0o700  # access to folders: contents are prompts and answers

Record = TypeVar("Record", StoredFile, StoredBatch)


@dataclass(frozen=True, slots=True)
class BatchBounds:
    """Limits of stored files. `ttl_s`: default and maximum lifetime of a file."""

    file_bytes: int
    key_bytes: int
    all_bytes: int
    ttl_s: float


class Page(NamedTuple):
    """Page of a list, newest first unless requested otherwise."""

    shown: list[dict[str, Any]]
    has_more: bool

    @property
    def content(self) -> dict[str, Any]:
        ends = {"first_id": self.shown[0]["id"], "last_id": self.shown[-1]["id"]} if self.shown else {}
        return {
            "object": "list",
            "data": self.shown,
            "first_id": None,
            "last_id": None,
            **ends,
            "has_more": self.has_more,
        }


class Upload:
    """File that is being written. Call `discard` after use; it does nothing once the file is stored."""

    def __init__(self, folder: Path, file_id: str) -> None:
        self.path = folder / file_id
        self._part = folder / f"{file_id}{_PART}"
        self._file: BinaryIO = self._part.open("xb")

    def write(self, data: bytes) -> None:
        self._file.write(data)

    def publish(self) -> None:
        self._file.close()
        self._part.replace(self.path)

    def discard(self) -> None:
        with suppress(OSError):  # a full disk, which the failed write has reported
            self._file.close()
        self._part.unlink(missing_ok=True)


class BatchStorage:
    """Files and batches by tenant. Problems are raised for unknown ids and exceeded limits, OSError for the disk's."""

    def __init__(self, folder: Path, bounds: BatchBounds, clock: Callable[[], float] = time.time) -> None:  # noqa: TID251 -- expiry outlives processes
        self._folder = folder
        self.bounds = bounds
        self.now_s = clock
        self._reserved = Counter[str]()  # bytes of unfinished uploads, by owner

    # Files

    def begin_upload(self, tenant: str, size: int) -> Upload:
        """Reserve `size` bytes and begin a file. Call `end_upload` with the same size later. Raises: Problem (413)."""
        owner = owner_of(tenant)
        self._check_room(owner, size)
        self._reserved[owner] += size
        try:
            return Upload(self._made(owner, "files"), new_id(FILE, self.now_s()))
        except OSError:
            self._reserved[owner] -= size
            raise

    def end_upload(self, tenant: str, size: int, upload: Upload) -> None:
        upload.discard()
        self._reserved[owner_of(tenant)] -= size

    def store(self, upload: Upload, filename: str, ttl_s: float | None) -> StoredFile:
        """Store an uploaded file. `ttl_s`: requested lifetime."""
        upload.publish()
        lifetime_s = self.bounds.ttl_s if ttl_s is None else min(ttl_s, self.bounds.ttl_s)
        return self.describe(upload.path, filename, BATCH_PURPOSE, lifetime_s)

    def describe(self, path: Path, filename: str, purpose: str, ttl_s: float) -> StoredFile:
        """Write the description of a file with this content, which makes it visible."""
        now_s = self.now_s()
        file = StoredFile(path.name, path.stat().st_size, int(now_s), int(now_s + ttl_s), filename, purpose)
        _write(path.with_name(f"{path.name}.json"), file)
        return file

    def file(self, tenant: str, file_id: str, param: str | None = None) -> StoredFile:
        """Return a file's description. `param`: body field with the id, None if the path has it. Raises: Problem."""
        if is_id(file_id, FILE):
            found = _read(self._of(tenant, "files") / f"{file_id}.json", StoredFile)
            if found is not None and found.expires_at > self.now_s():
                return found
        raise _not_found("file", file_id, f"files are kept for {self.bounds.ttl_s:g} s at most (--batch-ttl-s)", param)

    def content_path(self, tenant: str, file_id: str) -> Path:
        return self._of(tenant, "files") / file_id

    def delete_file(self, tenant: str, file_id: str) -> None:
        """Delete a file. Raises: Problem (404)."""
        self.file(tenant, file_id)
        _remove_file(self.content_path(tenant, file_id))

    def files(self, tenant: str, after: str, limit: int, ascending: bool, purpose: str | None) -> Page:
        now_s = self.now_s()

        def is_listed(file: StoredFile) -> bool:
            return file.expires_at > now_s and purpose in (None, file.purpose)

        return _page(self._of(tenant, "files"), StoredFile, after, limit, ascending, is_listed)

    # Batches

    def create(
        self, tenant: str, input_file_id: str, endpoint: str, metadata: Mapping[str, str] | None, ttl_s: float | None
    ) -> StoredBatch:
        """Store a new batch, which a router then runs. Raises: Problem (404, 413, 429)."""
        source, owner = self.file(tenant, input_file_id, "input_file_id"), owner_of(tenant)
        running = self._made(owner, "running")
        if sum(1 for _ in running.iterdir()) >= MAX_UNFINISHED:
            message = f"{MAX_UNFINISHED} batches of this API key are unfinished, the maximum; wait for one"
            raise Problem(HTTPStatus.TOO_MANY_REQUESTS, message, code="too_many_batches", retry_after_s=60.0)
        self._check_room(owner, source.bytes)
        now_s = self.now_s()
        batch = StoredBatch(
            id=new_id(BATCH, now_s),
            tenant=tenant,
            endpoint=endpoint,
            input_file_id=input_file_id,
            created_at=int(now_s),
            expires_at=int(now_s) + WINDOW_S,
            results_ttl_s=self.bounds.ttl_s if ttl_s is None else min(ttl_s, self.bounds.ttl_s),
            metadata=metadata,
        )
        (running / batch.id).mkdir(mode=_MODE)
        with (running / batch.id / REQUESTS_PART).open("wb") as part:
            part.truncate(source.bytes)  # counts before the requests are written, which takes as much room
        self.save(batch)  # from now on, a router may run it
        return batch

    def batch(self, tenant: str, batch_id: str) -> StoredBatch:
        """Return a batch. Raises: Problem (404)."""
        found = _read(self._of(tenant, "batches") / f"{batch_id}.json", StoredBatch) if is_id(batch_id, BATCH) else None
        if found is None:
            raise _not_found("batch", batch_id, "batches are kept as long as files (--batch-ttl-s)")
        return self._with_cancellation(found)

    def cancel(self, tenant: str, batch_id: str) -> StoredBatch:
        """Ask the router that runs a batch to cancel it. Raises: Problem (404, 409)."""
        batch = self.batch(tenant, batch_id)
        if not batch.is_final and not batch.outcome:
            try:
                self._cancel_mark(batch).write_text(str(int(self.now_s())))
            except FileNotFoundError:
                batch = self.batch(tenant, batch_id)  # it completed while this read it
        if batch.is_final or batch.outcome:
            message = f"the batch is {batch.status} and can no longer be cancelled"
            raise Problem(HTTPStatus.CONFLICT, message, code="batch_not_cancellable")
        return self._with_cancellation(batch)

    def batches(self, tenant: str, after: str, limit: int) -> Page:
        return _page(
            self._of(tenant, "batches"), StoredBatch, after, limit, False, lambda batch: True, self._with_cancellation
        )

    def save(self, batch: StoredBatch) -> None:
        """Replace the description of a batch. Only its creator and the router that holds its lock may call it."""
        _write(self._made(owner_of(batch.tenant), "batches") / f"{batch.id}.json", batch)

    def _with_cancellation(self, batch: StoredBatch) -> StoredBatch:
        """Return the batch with the status `cancelling` if its router has still to cancel it."""
        if batch.is_final or batch.outcome:
            return batch
        try:
            return batch.moved(CANCELLING, float(self._cancel_mark(batch).read_text() or self.now_s()))
        except FileNotFoundError:
            return batch

    def _cancel_mark(self, batch: StoredBatch) -> Path:
        return self._of(batch.tenant, "running") / batch.id / "cancel"

    def unfinished(self) -> list[Path]:
        """Return the folders of unfinished batches, oldest first."""
        return sorted(self._folder.glob(f"*/running/{BATCH}*"), key=lambda path: path.name)

    def described(self, running: Path) -> StoredBatch | None:
        """Return the batch of a folder from `unfinished`; None if its description is gone."""
        return _read(running.parents[1] / "batches" / f"{running.name}.json", StoredBatch)

    # Room

    def sweep(self) -> None:
        """Remove expired files, batches that are older than results may be, and unfinished uploads of earlier days."""
        now_s = self.now_s()
        for path in self._folder.glob(f"*/files/{FILE}*{_PART}"):
            if path.stat().st_mtime < now_s - _MAX_UPLOAD_S:
                path.unlink(missing_ok=True)
        for path in self._folder.glob(f"*/files/{FILE}*.json"):
            file = _read(path, StoredFile)
            if file is not None and file.expires_at <= now_s:
                _remove_file(path.with_suffix(""))
        for path in self._folder.glob(f"*/batches/{BATCH}*.json"):
            batch = _read(path, StoredBatch)
            if batch is not None and batch.is_final and batch.expires_at + self.bounds.ttl_s <= now_s:
                path.unlink(missing_ok=True)
        for path in self.unfinished():
            if self.described(path) is None and path.stat().st_mtime < now_s - _MAX_UPLOAD_S:
                remove_folder(path)

    def _check_room(self, owner: str, size: int) -> None:
        """Check that `size` more bytes of an owner may be stored. Raises: Problem (413)."""
        used = {path.name: _size(path) for path in self._folder.iterdir()} if self._folder.exists() else {}
        bounds = self.bounds
        for stored, most, what, option in (
            (used.get(owner, 0) + self._reserved[owner], bounds.key_bytes, "this API key", "--batch-key-bytes"),
            (sum(used.values()) + self._reserved.total(), bounds.all_bytes, "all API keys", "--batch-all-bytes"),
        ):
            if stored + max(size, _ENTRY_BYTES) > most:
                message = f"{stored} bytes of {what} are stored, and {size} more exceed the limit of {most} ({option})"
                raise Problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"{message}; delete files", code="no_room_for_file")

    def _of(self, tenant: str, kind: str) -> Path:
        return self._folder / owner_of(tenant) / kind

    def _made(self, owner: str, kind: str) -> Path:
        folder = self._folder / owner / kind
        for path in (self._folder, folder.parent, folder):
            path.mkdir(mode=_MODE, exist_ok=True)
        return folder


def _page(
    folder: Path,
    kind: type[Record],
    after: str,
    limit: int,
    ascending: bool,
    is_listed: Callable[[Record], bool],
    shown_as: Callable[[Record], Record] = lambda record: record,
) -> Page:
    names = sorted((path.name.removesuffix(".json") for path in folder.glob("*.json")), reverse=not ascending)
    rest = (name for name in names if not after or (name > after if ascending else name < after))
    shown: list[dict[str, Any]] = []
    for name in rest:
        record = _read(folder / f"{name}.json", kind)
        if record is None or not is_listed(record):
            continue
        if len(shown) == limit:
            return Page(shown, True)
        shown.append(shown_as(record).shown)
    return Page(shown, False)


def _read(path: Path, kind: type[Record]) -> Record | None:
    """Return a description; None if it does not exist. Raises: OSError."""
    try:
        return kind(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise OSError(f"{path} is not a description: {error}") from error


def _write(path: Path, record: StoredFile | StoredBatch) -> None:
    """Replace a description atomically."""
    part = path.with_name(f"{path.name}{_PART}")
    with part.open("wb") as file:
        file.write(json.dumps(asdict(record), ensure_ascii=False).encode())
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _remove_file(path: Path) -> None:
    path.with_name(f"{path.name}.json").unlink(missing_ok=True)
    path.unlink(missing_ok=True)


def remove_folder(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


def _size(folder: Path) -> int:
    """Return the size of all files in a folder. A file counts at least _ENTRY_BYTES."""
    return sum(max(_ENTRY_BYTES, size) for size in _sizes(folder))


def _sizes(folder: Path) -> Iterator[int]:
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    yield from _sizes(Path(entry.path))
                else:
                    yield entry.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        return  # removed while this reads it


def _not_found(what: str, name: str, reason: str, param: str | None = None) -> Problem:
    message = f"unknown {what} {name[:64]!r} of this API key; {reason}"
    return Problem(HTTPStatus.NOT_FOUND, message, param, f"{what}_not_found")
