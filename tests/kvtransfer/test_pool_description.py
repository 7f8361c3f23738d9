from dataclasses import replace

import pytest

from baton.kvtransfer.description import PoolDescription, SharedMemoryHandle, can_map, check_compatible, host_id
from baton.kvtransfer.transport import PairingRefused
from baton.versions import OWN, UNANNOUNCED, Versions

HANDLE = SharedMemoryHandle(pid=1, fd=2, inode=3, size_bytes=4096 * 10)
POOL = PoolDescription(b"model", 4096, 10, "host", b"pool", HANDLE)


def test_pools_of_different_sizes_go_together():
    check_compatible(POOL, replace(POOL, num_blocks=7))


@pytest.mark.parametrize(
    ("field", "theirs"),
    [
        ("fingerprint", replace(POOL, fingerprint=b"other")),
        ("versions", replace(POOL, versions=Versions("9.0.0", 9, 9))),
        ("block_bytes", replace(POOL, block_bytes=2048)),
        ("shared_memory", replace(POOL, num_blocks=11)),
    ],
)
def test_refused_pairing_names_the_field(field, theirs):
    with pytest.raises(PairingRefused, match=field) as refused:
        check_compatible(POOL, theirs)
    assert refused.value.field == field


def test_processes_without_a_common_protocol_do_not_pair_and_are_named() -> None:
    with pytest.raises(PairingRefused) as refused:
        check_compatible(POOL, replace(POOL, versions=Versions("9.0.0", 9, 9)))
    assert "release 9.0.0 (protocol 9)" in str(refused.value) and str(OWN) in str(refused.value)


@pytest.mark.parametrize(
    ("theirs", "named"),
    [
        ({"layout": "layers=2 dtype=int8"}, ("layout", "dtype=float32 here", "dtype=int8 there")),
        ({"checkpoint": b"d"}, ("checkpoint", b"c".hex(), b"d".hex())),
        ({"layout": "", "checkpoint": b"", "versions": UNANNOUNCED}, ("fingerprint", b"model".hex(), b"other".hex())),
    ],
)
def test_of_other_kv_the_part_that_differs_is_named(theirs, named) -> None:
    mine = replace(POOL, checkpoint=b"c", layout="layers=2 dtype=float32")
    with pytest.raises(PairingRefused) as refused:
        check_compatible(mine, replace(mine, fingerprint=b"other", **theirs))
    assert all(word in str(refused.value) for word in named)


def test_pool_can_be_mapped_on_the_same_host_only():
    assert can_map(POOL, POOL)
    assert not can_map(POOL, replace(POOL, host_id="other"))
    assert not can_map(POOL, replace(POOL, shared_memory=None))


def test_host_id_is_stable_within_a_host():
    assert host_id() == host_id() != ""


def test_unknown_system_shares_memory_with_nobody(monkeypatch):
    def unreadable(self):
        raise FileNotFoundError(self)

    monkeypatch.setattr("pathlib.Path.read_text", unreadable)
    assert host_id() != host_id()
