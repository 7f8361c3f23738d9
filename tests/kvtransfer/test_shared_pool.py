"""The pool's memory within its own process."""

import mmap
import os
from pathlib import Path

import pytest
import torch

from baton.kvtransfer.shared_memory import SharedPool, open_peer


@pytest.fixture
def pool():
    pool = SharedPool.create(8192)
    yield pool
    pool.close()


def test_new_pool_is_writable_zeros_of_the_size_asked_for(pool):
    assert pool.tensor.dtype == torch.uint8
    assert pool.tensor.shape == (8192,)
    assert not pool.tensor.any()
    pool.tensor[8191] = 7
    assert pool.tensor[8191] == 7


def test_handle_names_the_open_file(pool):
    path = Path(f"/proc/{pool.handle.pid}/fd/{pool.handle.fd}")
    status = path.stat()
    assert (status.st_ino, status.st_size) == (pool.handle.inode, pool.handle.size_bytes)


def test_memory_has_no_name_that_a_crash_could_leave_behind(pool):
    path = Path(f"/proc/{pool.handle.pid}/fd/{pool.handle.fd}")
    assert str(path.readlink()) == "/memfd:baton-kv-pool (deleted)"


@pytest.mark.parametrize("nbytes", [0, -1])
def test_pool_of_no_bytes_is_refused(nbytes):
    with pytest.raises(ValueError, match="at least one byte"):
        SharedPool.create(nbytes)


def test_size_is_sealed(pool):
    for size in (0, 4096, 16384):
        with pytest.raises(PermissionError):
            os.ftruncate(pool.handle.fd, size)


def map_and_write(pool: SharedPool) -> mmap.mmap:
    mapping = mmap.mmap(pool.handle.fd, 4096, offset=4096)
    mapping[0] += 1
    return mapping


def test_mapping_before_the_seal_stays_writable_and_later_ones_are_rejected() -> None:
    pool = SharedPool.create(8192, sealed=False)
    early = map_and_write(pool)
    with pytest.raises(PermissionError):
        os.ftruncate(pool.handle.fd, 4096)
    pool.seal()
    early[0] += 1
    assert pool.tensor[4096] == 2
    with pytest.raises(PermissionError):
        map_and_write(pool)
    with pytest.raises(PermissionError):
        os.pwrite(pool.handle.fd, b"x", 0)
    pool.seal()  # again is nothing
    peer = open_peer(pool.handle)
    assert peer.array[4096] == 2
    peer.close()
    pool.close()


def test_closing_ends_the_file_once():
    pool = SharedPool.create(4096)
    pool.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(pool.handle.fd)
    with pytest.raises(ValueError, match="closed already"):
        pool.close()
    with pytest.raises(ValueError, match="is closed"):
        _ = pool.tensor


def test_tensors_and_peers_outlive_the_pool():
    pool = SharedPool.create(4096)
    tensor, peer = pool.tensor, open_peer(pool.handle)
    pool.close()
    tensor[5] = 9
    assert peer.array[5] == 9
    peer.close()


def test_memory_is_given_back_when_the_last_view_is_gone():
    pool = SharedPool.create(4096)
    inode = str(pool.handle.inode)

    def mapped() -> int:
        maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        return sum(fields[4] == inode and "baton-kv-pool" in fields[5] for fields in maps if len(fields) > 5)

    peer = open_peer(pool.handle)
    assert mapped() == 2
    pool.close()
    peer.close()
    assert mapped() == 0
