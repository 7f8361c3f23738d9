"""Unfinished batch that this process runs. All methods block: call them on a thread.

FOLDER/OWNER/running/ID/lock        locked by the router that runs the batch; the kernel unlocks it when the router dies
FOLDER/OWNER/running/ID/requests    two lines per request, its custom_id and its body; written by check.py
FOLDER/OWNER/running/ID/output      answers, one line each; a line is never changed
FOLDER/OWNER/running/ID/errors      failed requests, one line each
FOLDER/OWNER/running/ID/cancel      exists once the batch is cancelled

A line of output names its request by number. A killed router leaves at most one incomplete last line, which the next
router removes, and it skips the requests of all complete lines.
"""

import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from baton.router.http.batches.records import FAILED, FILE, FINALIZING, StoredBatch, new_id
from baton.router.http.batches.storage import REQUESTS, REQUESTS_PART, RESULT_PURPOSE, BatchStorage, remove_folder

OUTPUT, ERRORS = "output", "errors"
_NUMBER = re.compile(rb'\{"id": "batch_req_[0-9a-f]+_(\d+)", ')


class StoredRequest(NamedTuple):
    """Request of a batch. `custom_id`: in JSON. `body`: in JSON, unchecked."""

    number: int
    custom_id: bytes
    body: bytes


def output_line(batch_id: str, request: StoredRequest, response: bytes = b"null", error: bytes = b"null") -> bytes:
    """Return a line of output. `response`, `error`: in JSON."""
    name = f"batch_req_{batch_id.partition('_')[2]}_{request.number}".encode()
    named = b'{"id": "%b", "custom_id": %b' % (name, request.custom_id)
    return b'%b, "response": %b, "error": %b}\n' % (named, response, error)


class HeldBatch:
    """Batch whose lock this process holds. Call `release` after use."""

    def __init__(self, storage: BatchStorage, folder: Path, lock: BinaryIO, batch: StoredBatch) -> None:
        self.batch = batch
        self._storage = storage
        self._folder = folder
        self._lock = lock
        completed, failed = (_recover(folder / name) for name in (OUTPUT, ERRORS))
        # Unbuffered: after a failed write, nothing is written later.
        self._output, self._errors = ((folder / name).open("ab", buffering=0) for name in (OUTPUT, ERRORS))
        self._answered = completed | failed
        if not batch.outcome:  # otherwise the files may be published already
            self.batch = replace(batch, completed=len(completed), failed=len(failed))

    @classmethod
    def take(cls, storage: BatchStorage, folder: Path) -> "HeldBatch | None":
        """Lock a batch and return it; None if another router runs it or it has just been finished."""
        with suppress(FileNotFoundError, BlockingIOError), ExitStack() as unless_taken:
            lock = unless_taken.enter_context((folder / "lock").open("ab"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            batch = storage.described(folder)
            if batch is not None and batch.is_final:
                remove_folder(folder)  # its router was killed before it did so
            elif batch is not None and (folder / "lock").exists():
                held = cls(storage, folder, lock, batch)
                unless_taken.pop_all()
                return held
        return None

    def release(self) -> None:
        for file in (self._output, self._errors, self._lock):
            file.close()

    @property
    def is_checked(self) -> bool:
        return (self._folder / REQUESTS).exists()

    @property
    def input_path(self) -> Path:
        return self._storage.content_path(self.batch.tenant, self.batch.input_file_id)

    @property
    def requests_part(self) -> Path:
        return self._folder / REQUESTS_PART

    def accept_requests(self) -> None:
        """Accept the requests that were written to `requests_part`."""
        self.requests_part.replace(self._folder / REQUESTS)

    @property
    def is_cancelled(self) -> bool:
        return (self._folder / "cancel").exists()

    @property
    def is_expired(self) -> bool:
        return self._storage.now_s() >= self.batch.expires_at

    def save(self, batch: StoredBatch) -> None:
        self.batch = batch
        self._storage.save(batch)

    def requests(self) -> Iterator[StoredRequest]:
        """Yield the requests that have no line of output yet."""
        with (self._folder / REQUESTS).open("rb") as file:
            for number in range(self.batch.total):
                custom_id, body = file.readline(), file.readline()
                if number not in self._answered:
                    yield StoredRequest(number, custom_id.rstrip(b"\n"), body)

    def reject(self, errors: Sequence[Mapping[str, Any]]) -> None:
        """Store that the input file is invalid, and for which reasons."""
        self.save(self.batch.moved(FAILED, self._storage.now_s(), errors=errors))
        remove_folder(self._folder)

    def write(self, request: StoredRequest, line: bytes, has_failed: bool) -> None:
        """Append a line of output. It survives a SIGKILL of this process."""
        file = self._errors if has_failed else self._output
        rest = memoryview(line)
        while rest:
            rest = rest[file.write(rest) :]
        self._answered.add(request.number)
        completed, failed = self.batch.completed + (not has_failed), self.batch.failed + has_failed
        self.batch = replace(self.batch, completed=completed, failed=failed)

    def fail_rest(self, code: str, message: str) -> None:
        """Write an error for each request without output."""
        error = json.dumps({"code": code, "message": message}).encode()
        for request in self.requests():
            self.write(request, output_line(self.batch.id, request, error=error), True)

    def finish(self, outcome: str) -> None:
        """Publish the results and the final status. The successor of a killed router calls it again."""
        now_s = self._storage.now_s()
        if not self.batch.outcome:
            self.save(
                self.batch.moved(
                    FINALIZING,
                    now_s,
                    outcome=outcome,
                    output_file_id=new_id(FILE, now_s) if self.batch.completed else None,
                    error_file_id=new_id(FILE, now_s) if self.batch.failed else None,
                )
            )
        for file_id, file, name in (
            (self.batch.output_file_id, self._output, OUTPUT),
            (self.batch.error_file_id, self._errors, ERRORS),
        ):
            if file_id is not None:
                self._publish(file_id, file, name)
        self.save(self.batch.moved(self.batch.outcome, now_s))
        remove_folder(self._folder)

    def _publish(self, file_id: str, file: FileIO, name: str) -> None:
        path = self._storage.content_path(self.batch.tenant, file_id)
        if not path.exists():
            os.fsync(file.fileno())
            path.parent.mkdir(exist_ok=True)
            (self._folder / name).replace(path)
        self._storage.describe(path, f"{self.batch.id}_{name}.jsonl", RESULT_PURPOSE, self.batch.results_ttl_s)


def _recover(path: Path) -> set[int]:
    """Remove an incomplete last line of output, and return the numbers of the requests of all others."""
    numbers, complete = set[int](), 0
    with path.open("a+b") as file:
        file.seek(0)
        for line in file:
            if line.endswith(b"\n") and (found := _NUMBER.match(line)) is not None:
                complete += len(line)
                numbers.add(int(found[1]))
        file.truncate(complete)
    return numbers
