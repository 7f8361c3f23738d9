"""Which primitive multiplies the layers: what is measured, what is remembered, and that the logits are the same."""

import json
from pathlib import Path

import pytest
import torch

from engine.models import primitive
from engine.models.decoder import DecoderModel
from engine.models.onednn import has_onednn
from engine.models.packed import packs, with_native_layers
from engine.models.primitive import CACHE_FILE, ChosenLinear, Primitive, PrimitiveChoice, onednn_from_rows
from engine.plan import Chunk
from kernels.packed_weight import PackedWeight, Stored, pack, pack_int8
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import CPU, PagedModel

pytestmark = pytest.mark.skipif(not packs(CPU) or not has_onednn(), reason="there is nothing to choose from")


def weights() -> list[PackedWeight]:
    return [pack(torch.randn(40, 64), Stored.FLOAT32, None)]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each measurement, each of which finds 64 rows; no model is too small for one."""
    calls: list[int] = []

    def measure(weights: object, dtype: object) -> int:
        calls.append(1)
        return 64

    monkeypatch.setattr(primitive, "_measure", measure)
    monkeypatch.setattr(primitive, "LEAST_WEIGHT_BYTES", 1)
    return calls


def chosen(choice: PrimitiveChoice) -> int | None:
    return onednn_from_rows(choice, weights(), 2, torch.float32)


def test_what_was_measured_is_remembered(tmp_path: Path, measured: list[int]) -> None:
    choice = PrimitiveChoice(Primitive.AUTO, tmp_path / "cache")
    assert [chosen(choice), chosen(choice)] == [64, 64]
    assert len(measured) == 1


def test_another_number_of_threads_is_measured_anew(tmp_path: Path, measured: list[int]) -> None:
    for threads in (1, 2, 1):
        assert chosen(PrimitiveChoice(Primitive.AUTO, tmp_path, threads)) == 64
    assert len(measured) == 2
    assert len(json.loads((tmp_path / CACHE_FILE).read_text())) == 2


def test_a_spoilt_file_is_measured_over(tmp_path: Path, measured: list[int], caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / CACHE_FILE).write_text("{")
    assert chosen(PrimitiveChoice(Primitive.AUTO, tmp_path)) == 64
    assert "is not read" in caplog.text
    assert chosen(PrimitiveChoice(Primitive.AUTO, tmp_path)) == 64
    assert len(measured) == 1


def test_a_small_model_is_not_measured(tmp_path: Path) -> None:
    assert chosen(PrimitiveChoice(Primitive.AUTO, tmp_path)) is None
    assert not list(tmp_path.iterdir())


def test_quantised_weights_stay_with_our_kernels(measured: list[int]) -> None:
    integers = pack_int8(torch.ones(40, 64, dtype=torch.int8), torch.ones(40), None)
    assert onednn_from_rows(PrimitiveChoice(Primitive.ONEDNN), [integers], 2, torch.float32) is None


def test_a_measurement_chooses_one_of_its_sizes_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(primitive, "LEAST_WEIGHT_BYTES", 1)
    assert chosen(PrimitiveChoice(Primitive.AUTO)) in (None, *primitive.ROWS)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.4)])
def test_logits_are_the_same_by_either_primitive(tmp_path: Path, dtype: torch.dtype, tolerance: float) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    own, other = (PagedModel(folder, dtype=dtype, packed=True) for _ in range(2))
    assert isinstance(other.model, DecoderModel)
    other.model = with_native_layers(other.model, choice=PrimitiveChoice(Primitive.ONEDNN))
    assert isinstance(other.model.layers[0].qkv, ChosenLinear)
    found, expected = (each.logits([Chunk(0, [1, 2, 3, 4], 0, each.blocks(4))])[0] for each in (other, own))
    assert (found - expected).abs().max() < tolerance


def test_few_rows_stay_in_one_call_of_our_kernels(tmp_path: Path, measured: list[int]) -> None:
    paged = PagedModel(make_checkpoint(tmp_path, "llama"), packed=True)
    assert isinstance(paged.model, DecoderModel)
    model = with_native_layers(paged.model, choice=PrimitiveChoice(Primitive.AUTO))
    qkv = model.layers[0].qkv
    assert isinstance(qkv, ChosenLinear)
    few, many = torch.randn(63, qkv.onednn.weight.shape[1]), torch.randn(64, qkv.onednn.weight.shape[1])
    assert torch.equal(qkv(few), qkv.native(few))
    assert torch.equal(qkv(many), qkv.onednn(many))
