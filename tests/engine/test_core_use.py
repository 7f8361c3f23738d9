"""What workers of one machine say of their cores, through files."""

import time
from pathlib import Path

import pytest

from baton.engine.runner.core_use import WANTED_S, CoreUse, SpareCores


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


def test_cores_are_wanted_until_their_borrower_stops_wanting_them(tmp_path: Path) -> None:
    own, spare = CoreUse(tmp_path / "decode-0"), SpareCores.of(frozenset({0}), tmp_path / "decode-0")
    seen = [own.is_wanted]
    for wanted in (True, False):
        spare.want(wanted)
        seen.append(own.is_wanted)
    assert seen == [False, True, False]


def test_cores_are_not_wanted_for_long_by_a_borrower_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, spare = CoreUse(tmp_path / "decode-0"), SpareCores.of(frozenset({0}), tmp_path / "decode-0")
    spare.want(True)
    later_s = time.monotonic() + WANTED_S
    monkeypatch.setattr(time, "monotonic", lambda: later_s)
    assert not own.is_wanted


def test_borrower_with_more_own_cores_gains_less(tmp_path: Path) -> None:
    spare = SpareCores.of(frozenset({0}), tmp_path / "decode-0")
    assert spare.gain(frozenset({1})) == 3 * spare.gain(frozenset({1, 2, 3})) > 0.0 == spare.gain(None)
