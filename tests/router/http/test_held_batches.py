"""Batches on disk after their router was killed, and forms as they arrive."""

import json
from pathlib import Path

import pytest

from baton.router.http.batches.check import check
from baton.router.http.batches.held import HeldBatch, StoredRequest, output_line
from baton.router.http.batches.records import COMPLETED, IN_PROGRESS, StoredBatch
from baton.router.http.batches.storage import BatchBounds, BatchStorage
from baton.router.http.batches.upload import FormReader, ReceivedForm
from baton.router.http.edge.problem import Problem

URL = "/v1/completions"
LINES = b"".join(json.dumps({"custom_id": f"r{n}", "body": {"prompt": "a"}}).encode() + b"\n" for n in range(4))
NOW_S = 1_000_000.0


@pytest.fixture
def storage(tmp_path: Path) -> BatchStorage:
    return BatchStorage(tmp_path / "batches", BatchBounds(1 << 20, 1 << 30, 1 << 30, 3600.0), lambda: NOW_S)


def created(storage: BatchStorage) -> StoredBatch:
    upload = storage.begin_upload("me", len(LINES))
    upload.write(LINES)
    file = storage.store(upload, "in.jsonl", None)
    storage.end_upload("me", len(LINES), upload)
    return storage.create("me", file.id, URL, None, None)


def taken(storage: BatchStorage) -> HeldBatch:
    """The only unfinished batch, whose input was checked."""
    [folder] = storage.unfinished()
    held = HeldBatch.take(storage, folder)
    assert held is not None
    if not held.is_checked:
        checked = check(held.input_path, held.requests_part, URL, 1 << 20)
        held.save(held.batch.moved(IN_PROGRESS, NOW_S, total=checked.total))
        held.accept_requests()
    return held


def answer(held: HeldBatch, request: StoredRequest) -> None:
    held.write(request, output_line(held.batch.id, request, b'{"status_code": 200}'), False)


def test_batch_of_a_killed_router_continues_behind_complete_lines(storage: BatchStorage) -> None:
    batch = created(storage)
    held = taken(storage)
    requests = list(held.requests())
    assert [each.custom_id for each in requests] == [b'"r0"', b'"r1"', b'"r2"', b'"r3"']
    answer(held, requests[2])
    answer(held, requests[0])
    held.release()  # as the kernel does for a killed router
    [output] = storage.unfinished()[0].glob("output")
    with output.open("ab") as file:
        file.write(output_line(batch.id, requests[1], b'{"status_code": 200}')[:-9])
    held = taken(storage)
    assert [each.number for each in held.requests()] == [1, 3]
    assert held.batch.completed == 2
    for request in list(held.requests()):
        answer(held, request)
    held.finish(COMPLETED)
    held.release()
    done = storage.batch("me", batch.id)
    assert (done.status, done.completed, storage.unfinished()) == (COMPLETED, 4, [])
    assert done.output_file_id is not None
    lines = storage.content_path("me", done.output_file_id).read_bytes().splitlines()
    assert [json.loads(each)["custom_id"] for each in lines] == ["r2", "r0", "r1", "r3"]


def test_batch_is_locked_by_one_router(storage: BatchStorage) -> None:
    created(storage)
    held = taken(storage)
    [folder] = storage.unfinished()
    assert HeldBatch.take(storage, folder) is None
    held.release()
    again = HeldBatch.take(storage, folder)
    assert again is not None
    again.release()


@pytest.mark.parametrize("steps", range(1, 6))
def test_batch_is_published_once_whenever_its_router_is_killed(
    storage: BatchStorage, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    batch = created(storage)
    held = taken(storage)
    for request in list(held.requests()):
        answer(held, request)
    left = iter(range(steps))
    replace = Path.replace

    def dying(path: Path, target: Path) -> Path:
        if next(left, None) is None:
            raise InterruptedError
        return replace(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", dying)
        try:
            held.finish(COMPLETED)
        except InterruptedError:
            held.release()
            patch.undo()
            held = taken(storage)
            held.finish(held.batch.outcome or COMPLETED)
    held.release()
    done = storage.batch("me", batch.id)
    assert (done.status, done.completed, storage.unfinished()) == (COMPLETED, 4, [])
    results = storage.files("me", "", 10, True, "batch_output").shown
    assert [each["id"] for each in results] == [done.output_file_id]
    assert results[0]["bytes"] == storage.content_path("me", results[0]["id"]).stat().st_size > 0


FORM = (
    b'preamble\r\n--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="\xc3\xa4.jsonl"\r\nContent-Type: text/plain\r\n\r\n'
    b"one\r\n--x\r\n-\r\n--b--\r\nepilogue"
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(FORM)])
def test_form_is_read_however_it_is_cut(size: int) -> None:
    form = ReceivedForm(FormReader("multipart/form-data; boundary=b"), 100)
    for begin in range(0, len(FORM), size):
        form.feed(FORM[begin : begin + size])
    read = form.finish()
    assert (read.file, str(read.purpose), bytes(form.content)) == ("ä.jsonl", "batch", b"one\r\n--x\r\n-")


def test_incomplete_form_is_refused() -> None:
    form = ReceivedForm(FormReader("multipart/form-data; boundary=b"), 100)
    form.feed(FORM[:-20])
    with pytest.raises(Problem, match="last boundary"):
        form.finish()


@pytest.mark.parametrize("content_type", ["application/json", "multipart/form-data", ""])
def test_malformed_form_is_rejected(content_type: str) -> None:
    with pytest.raises(Problem, match="content-type"):
        FormReader(content_type)
