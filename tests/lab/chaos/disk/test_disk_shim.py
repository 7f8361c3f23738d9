"""The preloaded library makes disk calls fail as told, only for files of its folder, and counts them."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.lab.chaos.disk.shim import DiskShim, make_disk_shim
from tests.fixtures.waiting import wait_until

WRITES = """
import os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
print(os.pwritev(fd, [b"a" * 10, b"b" * 10], 0), flush=True)
print(os.preadv(fd, [bytearray(20)], 0), flush=True)
"""


@pytest.fixture
def shim(tmp_path: Path) -> Iterator[DiskShim]:
    folder = tmp_path / "kv"
    folder.mkdir()
    made = make_disk_shim(tmp_path, folder)
    assert made is not None, "no C compiler"
    yield made
    made.close()


def started(shim: DiskShim, path: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", WRITES, str(path)]
    environment = {**os.environ, **shim.environment}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def said(shim: DiskShim, path: Path) -> tuple[str, str]:
    """Run a process that writes 20 bytes and reads them, and return what it prints."""
    with started(shim, path) as process:
        out, err = process.communicate(timeout=30)
    return out, err


def test_unconfigured_disk_shim_changes_nothing(shim: DiskShim, tmp_path: Path) -> None:
    assert said(shim, tmp_path / "kv" / "file") == ("20\n20\n", "")


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_write_fails(shim: DiskShim, tmp_path: Path, error: int) -> None:
    shim.set("write_error", error)
    _, err = said(shim, tmp_path / "kv" / "file")
    assert os.strerror(error) in err
    assert shim.get("failed_writes") == 1
    assert said(shim, tmp_path / "file") == ("20\n20\n", ""), "not under its folder"


def test_read_fails(shim: DiskShim, tmp_path: Path) -> None:
    shim.set("read_error", errno.EIO)
    out, err = said(shim, tmp_path / "kv" / "file")
    assert (out, os.strerror(errno.EIO) in err, shim.get("failed_reads")) == ("20\n", True, 1)


def test_torn_write_takes_half_of_its_bytes(shim: DiskShim, tmp_path: Path) -> None:
    shim.set("cuts_writes", 1)
    assert said(shim, tmp_path / "kv" / "file") == ("10\n10\n", "")
    assert (tmp_path / "kv" / "file").read_bytes() == b"a" * 10
    assert shim.get("cut_writes") == 1


def test_delayed_read_hangs_until_released(shim: DiskShim, tmp_path: Path) -> None:
    shim.set("read_delay_us", 3_600_000_000)
    with started(shim, tmp_path / "kv" / "file") as process:
        wait_until(lambda: shim.get("slow_reads") == 1, "a slow read")
        assert process.poll() is None
        shim.set("read_delay_us", 0)
        assert process.communicate(timeout=30)[0] == "20\n20\n"


def test_only_one_process_has_a_torn_write(shim: DiskShim, tmp_path: Path) -> None:
    path = tmp_path / "kv" / "file"
    code = "import os, sys; sys.stdin.readline()\n" + WRITES
    command = [sys.executable, "-c", code, str(path)]
    environment = {**os.environ, **shim.environment}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        shim.set("torn_pid", process.pid)
        assert said(shim, path)[0] == "20\n20\n"
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.flush()
        wait_until(lambda: shim.get("torn_bytes") == 10, "half of the write")
        assert process.poll() is None
        process.kill()
