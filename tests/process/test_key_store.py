"""Keys change while a process runs; a file that goes bad changes nothing."""

import asyncio
from pathlib import Path

import pytest

from baton.process.security import api_keys as key_store
from baton.process.security.api_keys import ApiKey, KeyFormatError, KeyStore, digest_of


def write(file: Path, *names: str) -> None:
    """As another file in its place, like `baton keys new`: its time need not differ."""
    beside = file.with_suffix(".new")
    beside.write_text("".join(ApiKey(name, digest_of(name)).line + "\n" for name in names))
    beside.replace(file)


def good(store: KeyStore) -> set[str]:
    return {name for name in ("a", "b", "c") if store.ring.find(name) is not None}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write(tmp_path / "keys", "a")
    return tmp_path / "keys"


def test_changed_file_is_read_again(file: Path) -> None:
    store = KeyStore(file)
    write(file, "b", "c")
    assert good(store) == {"a"}
    store.poll()
    assert good(store) == {"b", "c"}


def test_unchanged_file_is_not_read_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = KeyStore(file)
    monkeypatch.setattr(key_store, "parse_key_file", lambda text: pytest.fail("read again"))
    store.poll()


def test_bad_or_absent_file_leaves_the_keys_of_before(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = KeyStore(file)
    file.write_text("baton-SECRET")
    store.poll()
    file.write_bytes(b"\xff\xfe SECRET")
    store.poll()
    file.unlink()
    store.poll()
    store.poll()
    assert good(store) == {"a"}
    assert [record.levelname for record in caplog.records] == ["ERROR"] * 3  # of each once
    assert "SECRET" not in caplog.text
    write(file, "b")
    store.poll()
    assert good(store) == {"b"}


def test_fixed_keys_are_valid_next_to_those_of_the_file(file: Path) -> None:
    store = KeyStore(file, (ApiKey("c", digest_of("c")),))
    assert good(store) == {"a", "c"}
    assert good(KeyStore(None, (ApiKey("c", digest_of("c")),))) == {"c"}


def test_bad_file_at_the_start_is_an_error(file: Path) -> None:
    file.write_text("{")
    with pytest.raises(KeyFormatError):
        KeyStore(file)


async def test_key_store_reload_and_time_both_read_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def until(names: set[str]) -> None:
        async with asyncio.timeout(20):
            while good(store) != names:
                await asyncio.sleep(0)

    monkeypatch.setattr(key_store, "POLL_S", 60.0)
    store = KeyStore(file)
    running = asyncio.create_task(store.run())
    await asyncio.sleep(0)
    write(file, "b")
    store.reload()
    await until({"b"})
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    monkeypatch.setattr(key_store, "POLL_S", 0.001)
    running = asyncio.create_task(store.run())
    write(file, "c")
    await until({"c"})
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
