"""What workers of one machine say of their cores, through files."""

from pathlib import Path

import pytest

from baton.engine.runner.thread_preparation import CoreUse, SpareCores


def test_another_process_reads_whether_cores_compute(tmp_path: Path) -> None:
    file = tmp_path / "cores" / "decode-0"
    own, spare = CoreUse(file), SpareCores.of(frozenset({0}), file)
    seen = [int(spare.in_use[0])]
    for computing in (True, False):
        own.mark(computing)
        seen.append(int(spare.in_use[0]))
    assert seen == [0, 1, 0]


def test_byte_of_another_process_cannot_be_written(tmp_path: Path) -> None:
    spare = SpareCores.of(frozenset({0}), tmp_path / "decode-0")
    with pytest.raises(ValueError, match="read-only"):
        spare.in_use[0] = 1
    mapped = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    assert [access for _, access, *_, file in mapped if file == str(tmp_path / "decode-0")] == ["r--s"]


@pytest.mark.parametrize("reader_first", [True, False])
def test_either_side_may_start_first(tmp_path: Path, reader_first: bool) -> None:
    file = tmp_path / "decode-0"
    spare = SpareCores.of(frozenset({0}), file) if reader_first else None
    own = CoreUse(file)
    spare = spare or SpareCores.of(frozenset({0}), file)
    own.mark(True)
    assert int(spare.in_use[0]) == 1


def test_restarted_worker_computes_nothing_yet(tmp_path: Path) -> None:
    file = tmp_path / "decode-0"
    CoreUse(file).mark(True)  # and was killed
    spare = SpareCores.of(frozenset({0}), file)
    CoreUse(file)
    assert int(spare.in_use[0]) == 0
