"""Two real processes: one owns a pool, the other maps it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO

import pytest

from baton.kvtransfer.description import SharedMemoryHandle
from baton.kvtransfer.shared_memory import SharedPool, open_peer
from baton.kvtransfer.transport import PeerUnreachable

ROOT = Path(__file__).parents[2]

OWNER = """
import json, sys
from dataclasses import asdict
from baton.kvtransfer.shared_memory import SharedPool
pool = SharedPool.create(65536)
pool.tensor[:4] = 1
print(json.dumps(asdict(pool.handle)), flush=True)
for line in sys.stdin:
    pool.tensor[:4] = int(line)
    print("done", flush=True)
"""

READER = """
import json, mmap, os, sys
from baton.kvtransfer.description import SharedMemoryHandle
from baton.kvtransfer.shared_memory import open_peer
handle = SharedMemoryHandle(**json.loads(sys.argv[1]))

def attempt(what):
    try:
        what()
        return "allowed"
    except PermissionError:
        return "refused"

fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDWR)
print(json.dumps({
    "sum": int(open_peer(handle).array.sum()),
    "map": attempt(lambda: mmap.mmap(fd, handle.size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_WRITE)),
    "write": attempt(lambda: os.pwrite(fd, b"x", 0)),
    "truncate": attempt(lambda: os.ftruncate(fd, 0)),
}))
"""


@contextmanager
def owner_process() -> Iterator[tuple["subprocess.Popen[str]", SharedMemoryHandle]]:
    """A process that writes the numbers it is told into the first four bytes of its pool."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process, SharedMemoryHandle(**json.loads(_pipe(process.stdout).readline()))
        finally:
            process.kill()


def test_another_process_reads_the_pool_and_can_do_nothing_else_to_it():
    pool = SharedPool.create(65536)
    pool.tensor[1000:1010] = 3
    command = [sys.executable, "-c", READER, json.dumps(asdict(pool.handle))]
    answer = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=240).stdout
    assert json.loads(answer) == {"sum": 30, "map": "refused", "write": "refused", "truncate": "refused"}
    assert pool.tensor.sum() == 30
    pool.close()


def test_owners_writes_are_visible_immediately():
    with owner_process() as (process, handle):
        peer = open_peer(handle)
        assert handle.pid == process.pid
        assert peer.array[:4].tolist() == [1, 1, 1, 1]
        _pipe(process.stdin).write("200\n")
        _pipe(process.stdin).flush()
        assert _pipe(process.stdout).readline() == "done\n"
        assert peer.array[:5].tolist() == [200, 200, 200, 200, 0]
        peer.close()


def test_peers_array_refuses_writes():
    pool = SharedPool.create(4096)
    peer = open_peer(pool.handle)
    with pytest.raises(ValueError, match="read-only"):
        peer.array[0] = 1
    peer.close()
    pool.close()


def test_killed_owner_leaves_the_map_readable_and_cannot_be_opened_again():
    with owner_process() as (process, handle):
        peer = open_peer(handle)
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=10)
        assert peer.array[:4].tolist() == [1, 1, 1, 1]
        with pytest.raises(PeerUnreachable, match="No such file"):
            open_peer(handle)
        peer.close()


def test_another_file_under_the_same_number_is_refused():
    pool = SharedPool.create(4096)
    for wrong in (replace(pool.handle, inode=pool.handle.inode + 1), replace(pool.handle, size_bytes=8192)):
        with pytest.raises(PeerUnreachable, match="not the announced pool"):
            open_peer(wrong)
    pool.close()


def test_pool_of_a_copied_machine_is_refused_by_its_id():
    """There PID, descriptor, inode and size may all be those of the pool that was announced here."""
    pool = SharedPool.create(4096, pool_id=b"ours")
    with pytest.raises(PeerUnreachable, match="not the announced pool"):
        open_peer(pool.handle, b"theirs")
    open_peer(pool.handle, b"ours").close()
    pool.close()


def test_pool_of_an_earlier_version_which_has_no_id_is_opened():
    pool = SharedPool.create(4096)
    open_peer(pool.handle, b"ours").close()
    pool.close()


def test_file_that_could_shrink_is_refused():
    fd = os.memfd_create("unsealed")
    os.ftruncate(fd, 4096)
    with pytest.raises(PeerUnreachable, match="not sealed"):
        open_peer(SharedMemoryHandle(os.getpid(), fd, os.fstat(fd).st_ino, 4096))
    os.close(fd)


def test_pipe_is_refused_without_waiting_for_its_writer(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    fd = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(PeerUnreachable):
        open_peer(SharedMemoryHandle(os.getpid(), fd, os.fstat(fd).st_ino, 0))
    os.close(fd)


def test_closing_is_done_once():
    pool = SharedPool.create(4096)
    peer = open_peer(pool.handle)
    peer.close()
    with pytest.raises(ValueError, match="closed already"):
        peer.close()
    with pytest.raises(PeerUnreachable, match="closed"):  # by now another copy may have been waiting for it
        _ = peer.array
    pool.close()


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream
