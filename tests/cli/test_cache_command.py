"""`baton cache` on a directory of files, with workers that run and workers that do not."""

import json
from pathlib import Path

from typer.testing import CliRunner

from baton.cli.__main__ import app
from tests.fixtures.tier_blocks import FORMAT, named_blocks, segment_files, store_in


def cache(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["cache", *map(str, arguments)])
    return result.exit_code, result.output


def lines(output: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in output.splitlines()]


def filled(directory: Path, owner: str, blocks: int) -> None:
    store = store_in(directory, owner, blocks=6400)
    first = 1000 * len(segment_files(directory, "prefill-0"))  # what another one has is not written again
    store.put(named_blocks(range(first, first + blocks)))
    store.close()


def test_cache_ls_lists_files_with_blocks(tmp_path: Path) -> None:
    filled(tmp_path, "prefill-0", 5)
    filled(tmp_path, "decode-0", 3)
    (tmp_path / "decode-0" / "000000000009.kv").write_bytes(b"?" * 100)
    code, output = cache("ls", tmp_path, "--json")
    shown = {(each["worker"], each["segment"]): (each["blocks"], each["block_bytes"]) for each in lines(output)}
    assert code == 0
    assert shown == {
        ("prefill-0", 1): (5, FORMAT.block_bytes),
        ("decode-0", 1): (3, FORMAT.block_bytes),
        ("decode-0", 9): (0, 0),
    }
    assert "not readable" in cache("ls", tmp_path)[1]


def test_cache_du_lists_workers_with_state(tmp_path: Path) -> None:
    filled(tmp_path, "prefill-0", 5)
    running = store_in(tmp_path, "decode-0")
    _, output = cache("du", tmp_path, "--json")
    running.close()
    decode, prefill = lines(output)
    assert (decode["worker"], decode["runs"], decode["blocks"], decode["size_bytes"]) == ("decode-0", True, 0, 0)
    size_bytes = segment_files(tmp_path, "prefill-0")[0].stat().st_size
    assert (prefill["runs"], prefill["blocks"], prefill["size_bytes"]) == (False, 5, size_bytes)


def test_cache_clear_keeps_files_of_running_worker(tmp_path: Path) -> None:
    filled(tmp_path, "prefill-0", 5)
    filled(tmp_path, "decode-0", 5)
    running = store_in(tmp_path, "decode-0")
    code, output = cache("clear", tmp_path)
    running.close()
    assert code == 1
    assert "decode-0 is running" in output
    assert segment_files(tmp_path, "prefill-0") == []
    assert len(segment_files(tmp_path, "decode-0")) == 1


def test_cache_clear_of_one_worker_keeps_others(tmp_path: Path) -> None:
    filled(tmp_path, "prefill-0", 5)
    filled(tmp_path, "decode-0", 5)
    assert cache("clear", tmp_path, "--worker", "decode-0")[0] == 0
    assert (len(segment_files(tmp_path, "prefill-0")), segment_files(tmp_path, "decode-0")) == (1, [])


def test_cache_missing_directory_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["cache", "du", str(tmp_path / "none")])
    assert "is not a directory" in str(result.exception)


def test_cache_other_folder_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir(mode=0o755)
    assert cache("du", tmp_path)[0] == cache("clear", tmp_path)[0] == 0
    assert list((tmp_path / "photos").iterdir()) == []
    assert (tmp_path / "photos").stat().st_mode & 0o777 == 0o755
