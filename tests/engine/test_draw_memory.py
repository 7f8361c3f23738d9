"""What draws on the host take of a GPU is what is set aside for them. PyTorch's profiler counts every allocation."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from baton.engine.kv_cache import memory
from baton.engine.kv_cache.memory import LargestStep, prepare_with_spare_memory
from baton.engine.prepare import ModelOptions
from baton.engine.request import Sample
from baton.engine.sampling import sampler
from baton.engine.sampling.params import SamplingParams
from baton.engine.sampling.sampler import Row, draw_bytes, sample
from baton.kernels.reference import row_statistics
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.metered_rank import ToldMeter
from tests.fixtures.paged import CPU

ROWS, VOCABULARY, ELEMENTS = 64, 1 << 13, 1 << 15
SMALL_BYTES = 1 << 20  # indices, numbers of each row
FILTERS = {"top_k": 4000, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.8, "temperature": 0.9}
PENALTIES = {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "allowed_token_ids": tuple(range(6000))}


def peak_bytes(compute: Callable[[], object]) -> int:
    compute()  # threads and libraries are set up
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        compute()
    allocated = peak = 0
    for event in profiled.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    return peak


@pytest.fixture
def logits(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Drawn from as on a GPU, in less scratch memory."""
    monkeypatch.setattr(sampler, "CPU_SCRATCH_ELEMENTS", ELEMENTS)
    monkeypatch.setattr(sampler, "DEVICE_SCRATCH_ELEMENTS", ELEMENTS)
    monkeypatch.setattr(sampler, "samples_natively", lambda logits: False)
    return torch.randn(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(3))


def test_masks_of_a_whole_batch_take_no_more(logits: torch.Tensor) -> None:
    masks = [torch.full((VOCABULARY // 8,), 0x5A, dtype=torch.uint8)] * ROWS
    peak = peak_bytes(lambda: row_statistics(logits, masks))
    assert 0.9 * draw_bytes(ROWS, VOCABULARY) < peak < draw_bytes(ROWS, VOCABULARY) + SMALL_BYTES


@pytest.mark.parametrize("changed", [{}, PENALTIES], ids=["filters", "penalties"])
def test_filters_take_no_more(changed: dict[str, object], logits: torch.Tensor) -> None:
    rows = [
        Row((Sample(0, SamplingParams(max_tokens=9, seed=row, **FILTERS, **changed), (1, 2, 3), 1),), 3)  # type: ignore[arg-type]
        for row in range(ROWS // 8)
    ]
    few = logits[: len(rows)]
    bound = draw_bytes(len(rows), VOCABULARY)
    assert 0.4 * bound < peak_bytes(lambda: sample(few, rows)) < bound + SMALL_BYTES


def test_memory_of_draws_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ModelOptions(make_checkpoint(tmp_path, "llama"), CPU, "float32", 1, 0, None)

    def pool_bytes() -> int:
        meter = ToldMeter(1 << 31)
        return prepare_with_spare_memory(asked, LargestStep(20, 3), 0.9, meter=lambda device: meter).pool_bytes

    with_draws = pool_bytes()
    monkeypatch.setattr(memory, "draw_bytes", lambda rows, vocab_size: 0)
    block_bytes = 2 * 4 * 2 * 16 * 4
    assert abs(pool_bytes() - with_draws - draw_bytes(3, 512)) <= block_bytes
