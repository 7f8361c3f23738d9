"""The id of a directory: made once, whole or not at all, the same for all who read it."""

import os
import stat
from pathlib import Path

import pytest

from baton.kvtransfer.tier.files import ID_BYTES, ID_NAME, RealDisk
from tests.fixtures.faulty_disk import Faults, FaultyDisk
from tests.fixtures.tier_blocks import store_in


def test_directory_id_is_drawn_once_and_private(tmp_path: Path) -> None:
    directory = tmp_path / "kv"
    drawn = RealDisk(directory).identify()
    assert len(drawn) == ID_BYTES
    assert RealDisk(directory).identify() == drawn
    assert [path.name for path in directory.iterdir()] == [ID_NAME], "no draft is left"
    assert stat.S_IMODE((directory / ID_NAME).stat().st_mode) == 0o600
    assert RealDisk(tmp_path / "other").identify() != drawn


def test_directory_id_is_the_same_by_another_path(tmp_path: Path) -> None:
    drawn = RealDisk(tmp_path / "kv").identify()
    (tmp_path / "mounted").symlink_to(tmp_path / "kv")
    assert RealDisk(tmp_path / "mounted").identify() == drawn


def test_slower_worker_takes_the_existing_directory_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link, sooner = os.link, []

    def overtaken(draft: Path, path: Path) -> None:
        monkeypatch.setattr(os, "link", link)
        sooner.append(RealDisk(tmp_path).identify())
        link(draft, path)

    monkeypatch.setattr(os, "link", overtaken)
    assert RealDisk(tmp_path).identify() == sooner[0]
    assert [path.name for path in tmp_path.iterdir()] == [ID_NAME]


def test_malformed_id_file_is_an_error_and_opens_no_store(tmp_path: Path) -> None:
    (tmp_path / ID_NAME).write_text("what is this")
    with pytest.raises(OSError, match="invalid directory id"):
        RealDisk(tmp_path).identify()
    with pytest.raises(OSError, match="invalid directory id"):
        store_in(tmp_path)


def test_directory_id_that_another_user_hides_is_drawn_by_each_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = RealDisk(tmp_path).identify()

    def refused(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refused)
    assert len({drawn, RealDisk(tmp_path).identify(), RealDisk(tmp_path).identify()}) == 3


def test_store_has_the_directory_id_while_it_is_open(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    assert store.directory_id == RealDisk(tmp_path).identify()
    store.close()
    assert store.directory_id == b""


def test_directory_id_that_cannot_be_read_leaves_the_folder_free(tmp_path: Path) -> None:
    faults = Faults(failing={"identify": 5})
    with pytest.raises(OSError, match="injected into identify"):
        store_in(FaultyDisk(tmp_path, faults))
    store_in(tmp_path).close()
