"""Records as JSON and lists of workers as text."""

import json

import pytest

from baton.process.registry.worker_record import WorkerRecord, WorkerRole, parse_workers
from baton.versions import OWN


def test_record_survives_json() -> None:
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
def test_malformed_worker_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        parse_workers(text)


def test_record_of_a_release_that_announces_no_versions_is_read() -> None:
    fields = '{"worker_id":"a","role":"decode","endpoint":"h:1","epoch":1,"fingerprint":"ab"}'
    assert WorkerRecord.from_json(fields) == WorkerRecord("a", WorkerRole.DECODE, "h:1", 1, "ab")


def test_fields_of_a_later_release_are_ignored() -> None:
    record = WorkerRecord("decode-0", WorkerRole.DECODE, "127.0.0.1:7", 5, "ab", "9.0.0", 9, 1)
    assert WorkerRecord.from_json(json.dumps({**json.loads(record.to_json()), "zone": "b"})) == record


def test_unreadable_record_names_its_author_and_both_versions() -> None:
    fields = {"worker_id": "encode-0", "role": "encode", "endpoint": "h:1", "epoch": 1, "fingerprint": ""}
    with pytest.raises(ValueError, match="not a worker record") as unreadable:
        WorkerRecord.from_json(json.dumps({**fields, "release": "9.0.0", "protocol": 9}))
    assert f"encode-0, release 9.0.0 (protocol 9), read by {OWN}" in str(unreadable.value)


def test_address_that_could_end_anywhere_needs_brackets() -> None:
    with pytest.raises(ValueError, match=r"as in decode@\[fd00::1\]:50061"):
        parse_workers("decode@fd00::1:50061")
