"""The benchmark of many blocks finds them all, and the store keeps its bound."""

from pathlib import Path

import pytest

from baton.lab.benchmarks.transfer.tier_scale import measure


def test_all_blocks_are_found_and_the_folder_keeps_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    point = measure(20_000, block_bytes=256)
    assert point.blocks == 20_000
    assert 0.9 < point.most_of_bound <= 1.0
    assert 0 < point.open_s < 20.0
    assert list(tmp_path.iterdir()) == [], "it leaves nothing behind"
