"""Records as JSON and lists of workers as text."""

import pytest

from baton.service.registry.worker_record import WorkerRecord, WorkerRole, parse_workers


def test_a_record_survives_json() -> None:
    record = WorkerRecord("decode-0", WorkerRole.DECODE, "127.0.0.1:7", 5, "ab")
    assert WorkerRecord.from_json(record.to_json()) == record


@pytest.mark.parametrize("text", ["", "[]", "3", "{}", '{"worker_id":"a","role":"cook","endpoint":"h:1","epoch":1}'])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a worker record"):
        WorkerRecord.from_json(text)


def test_workers_given_by_hand() -> None:
    first, second = parse_workers("prefill@host:1, decode@[::1]:2")
    assert (first.role, first.endpoint, first.epoch) == (WorkerRole.PREFILL, "host:1", None)
    assert (second.role, second.endpoint) == (WorkerRole.DECODE, "[::1]:2")
    assert first.worker_id != second.worker_id


@pytest.mark.parametrize("text", ["prefill", "cook@h:1", "decode@h", "decode@:1", "decode@h:x"])
def test_a_malformed_worker_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        parse_workers(text)


def test_an_address_that_could_end_anywhere_needs_brackets() -> None:
    with pytest.raises(ValueError, match=r"as in decode@\[fd00::1\]:50061"):
        parse_workers("decode@fd00::1:50061")
