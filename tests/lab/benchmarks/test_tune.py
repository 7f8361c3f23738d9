"""Tuning skips a candidate that fails, and ends if the device is lost."""

from collections.abc import Iterator

import pytest

from baton.kernels.triton.launch import FEW_ROWS, Device, FewRows, KernelCall, Tile
from baton.lab.benchmarks.triton import few_rows, tune

TILES = [Tile(16, tokens, 4, 3) for tokens in (32, 64, 128)]
HOPPER = Device(90, 132)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    def shapes(kernel: str) -> Iterator[tuple[str, tune.Shape]]:
        def calls(tile: Tile, device: Device) -> list[list[KernelCall]]:
            return [[KernelCall(None, (1,), {"tile": tile}, tile.warps)]]  # type: ignore[arg-type]

        yield "small", calls
        yield "large", calls

    monkeypatch.setattr(tune, "candidates", lambda kernel: iter(TILES))
    monkeypatch.setattr(tune, "shapes", shapes)


def timed(layers: list[list[KernelCall]]) -> float:
    """Time candidates: the middle one fails, and the last one is the fastest."""
    tokens = layers[0][0].arguments["tile"].tokens
    if tokens == 64:
        raise RuntimeError("no kernel image")
    return 1e-3 / float(tokens)


def test_candidate_that_fails_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune, "settled", lambda device: True)
    assert tune.tuned("decode", HOPPER, timed) == TILES[2]
    said = capsys.readouterr().out.splitlines()
    assert "fails (RuntimeError: no kernel image)" in said[1]
    assert said[2].endswith("small: 7.8 us, large: 7.8 us  <- best so far")


def test_lost_device_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "settled", lambda device: False)
    with pytest.raises(tune.DeviceLost, match="tokens=64"):
        tune.tuned("decode", HOPPER, timed)


def test_few_rows_are_as_many_as_are_faster_than_a_library_for_every_shape() -> None:
    before, tile = FEW_ROWS[90], FewRows(4, 4096, 512, 2)

    def seconds(shape: few_rows.LayerShape, rows: int) -> float:
        used = FEW_ROWS[90]
        assert (used.tile_bytes, used.inputs, used.warps) == (4096, 512, 2)
        slower_from = 8 if shape.hidden == 4096 else 16
        return 1.0 if used.rows == 0 else 2.0 if rows >= slower_from else 0.5

    assert few_rows.most_rows(tile, HOPPER, seconds) == 4
    assert few_rows.most_rows(tile, HOPPER, lambda shape, rows: 1.0) == 0
    assert FEW_ROWS[90] == before
