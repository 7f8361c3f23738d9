"""Which attention computes prompts: what follows from times, how they are taken, and what a batch makes of it."""

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.engine.config.model_config import ModelConfig, ModelError
from baton.engine.kv_cache.layout import KvLayout
from baton.engine.models.batch import Batch, make_batch
from baton.engine.models.decoder import DecoderModel
from baton.engine.request import Chunk, Plan
from baton.engine.runner import prefill_attention
from baton.engine.runner.prefill_attention import (
    BUDGET_S,
    OURS,
    ChunkShape,
    PrefillAttention,
    PrefillChoice,
    Timed,
    all_shapes,
    choose,
    decide,
    library_bytes,
)
from baton.kernels.libraries.flashinfer import WORKSPACE_BYTES, FlashInferPrefill
from baton.kernels.types import KvPages, PrefillChunks
from tests.fixtures import imitated_flashinfer
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import CPU, PagedModel, random_prompt

CONFIG = ModelConfig("llama", 512, 64, 128, 1, 4, 2, 16, 20_000, frozenset())


def chunk(tokens: int, end: int, adapter: int = 0) -> Chunk:
    table = list(range(-(-end // 32)))
    return Chunk(0, [1] * tokens, end - tokens, table, adapter=adapter)


def pool(blocks: int = 128, dtype: torch.dtype = torch.bfloat16) -> KvPages:
    layout = KvLayout(1, CONFIG.num_kv_heads, 32, CONFIG.head_dim, dtype)
    return layout.view(torch.zeros(blocks * layout.block_bytes, dtype=torch.uint8), blocks)


class Timer:
    """Says what each call took, ours and the library's in turn, and that some time has passed; computes nothing."""

    def __init__(self, ours_s: float, library_s: float | None, pause_s: float = 0.0) -> None:
        self.calls, self.now_s = 0, 0.0
        self._times_s, self._pause_s = (ours_s, library_s), pause_s

    def __call__(self, call: Callable[[], object]) -> float:
        self.now_s += self._pause_s
        took_s = self._times_s[self.calls % 2]
        self.calls += 1
        if took_s is None:
            raise RuntimeError("no kernel for these heads")
        return took_s

    def now(self) -> float:
        return self.now_s


def test_library_is_chosen_for_shapes_where_it_is_clearly_faster() -> None:
    short, even, long = ChunkShape(256, 1024), ChunkShape(1024, 1024), ChunkShape(1024, 4096)
    assert decide([Timed(short, 1.0, 2.0), Timed(even, 1.0, 0.96), Timed(long, 1.0, 0.9)]) == {long}
    assert not decide([]) and not decide([Timed(long, 1.0, math.inf)])


@pytest.mark.parametrize(
    ("tokens", "end", "taken"),
    [
        (1024, 4096, True),
        (4096, 4096, True),
        (1500, 2000, True),
        (1024, 1024, False),  # a shape of its own
        (1023, 4096, False),
        (1024, 4097, False),
        (4096, 20_000, False),
        (20, 30, False),
    ],
)
def test_unmeasured_chunk_uses_the_choice_for_fewer_tokens_in_a_longer_context(
    tokens: int, end: int, taken: bool
) -> None:
    choice = PrefillChoice(frozenset({ChunkShape(1024, 4096), ChunkShape(4096, 4096)}))
    assert choice.takes(chunk(tokens, end)) is taken


def test_both_are_measured_at_every_shape_that_the_pool_has_room_for(caplog: pytest.LogCaptureFixture) -> None:
    timer = Timer(2.0, 1.0)
    with caplog.at_level(logging.INFO, logger=prefill_attention.__name__):
        choice = choose(PrefillAttention.AUTO, CONFIG, pool(128), timer, timer.now)
    assert choice.by_library == {shape for shape in all_shapes() if shape.context <= 4096}
    assert timer.calls == 2 * len(choice.by_library) == 10
    [said] = caplog.messages
    assert "256 of 1024, 256 of 4096" in said and "measured at 5 shapes" in said


def test_largest_shapes_are_measured_before_the_time_is_over() -> None:
    timer = Timer(2.0, 1.0, pause_s=0.4 * BUDGET_S)
    assert choose(PrefillAttention.AUTO, CONFIG, pool(), timer, timer.now).by_library == {(1024, 4096), (4096, 4096)}


def test_failing_kernel_is_never_chosen(caplog: pytest.LogCaptureFixture) -> None:
    timer = Timer(2.0, None)
    assert choose(PrefillAttention.AUTO, CONFIG, pool(32), timer, timer.now) == OURS
    assert "no kernel for these heads" in caplog.messages[0]


def test_measurement_writes_nothing_to_the_pool() -> None:
    kv, results = pool(32), []

    def timer(call: Callable[[], object]) -> float:
        results.append(call())
        return 1.0

    kv.data.normal_()
    before = kv.data.clone()
    choose(PrefillAttention.AUTO, CONFIG, kv, timer)
    assert len(results) == 4 and torch.equal(kv.data, before)


def test_demanded_choice_is_not_measured() -> None:
    timer = Timer(1.0, 1.0)
    assert choose(PrefillAttention.TRITON, CONFIG, pool(), timer, timer.now) == OURS
    assert choose(PrefillAttention.SDPA, CONFIG, pool(), timer, timer.now).takes(chunk(300, 16384))
    assert timer.calls == 0


@pytest.mark.parametrize("asked", PrefillAttention)
def test_quantised_pool_is_read_by_our_kernel(asked: PrefillAttention) -> None:
    timer = Timer(2.0, 1.0)
    assert choose(asked, CONFIG, pool(dtype=torch.int8), timer, timer.now) == OURS
    assert timer.calls == 0


def test_device_for_which_pytorch_has_no_kernel_uses_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_attention, "is_fast_gathered", lambda heads, kv: False)
    timer = Timer(2.0, 1.0)
    assert choose(PrefillAttention.SDPA, CONFIG, pool(), timer, timer.now) == OURS


def test_memory_set_aside_is_that_of_keys_values_results_and_a_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    assert library_bytes(CONFIG, torch.bfloat16) == (2 * 2 * 16384 + 4 * 4096) * 16 * 2
    short = replace(CONFIG, max_positions=100)
    assert library_bytes(short, torch.float32) == (2 * 2 * 100 + 4 * 100) * 16 * 4
    imitated_flashinfer.install(monkeypatch, compiled=False)
    assert library_bytes(short, torch.float32) == (2 * 2 * 100 + 4 * 100) * 16 * 4 + WORKSPACE_BYTES


def test_flashinfer_is_the_library_where_its_kernels_are_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    imitated_flashinfer.install(monkeypatch)
    timer = Timer(2.0, 1.0)
    with caplog.at_level(logging.INFO, logger=prefill_attention.__name__):
        choice = choose(PrefillAttention.AUTO, CONFIG, pool(), timer, timer.now)
    assert choice.planner is not None and "by FlashInfer's" in caplog.messages[0]
    batch = choice.planned(make_batch([chunk(300, 300)], 32, CPU, by_library=choice.takes))
    assert batch.prefills is not None and batch.prefills.planned is not None
    answers = make_batch([chunk(1, 5)], 32, CPU, by_library=choice.takes)
    assert choice.planned(answers) is answers


@pytest.mark.parametrize("asked", [PrefillAttention.AUTO, PrefillAttention.SDPA, PrefillAttention.TRITON])
def test_start_does_not_wait_until_flashinfer_is_compiled(
    asked: PrefillAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    imitated_flashinfer.install(monkeypatch, compiled=False)
    timer = Timer(2.0, 1.0)
    assert choose(asked, CONFIG, pool(), timer, timer.now).planner is None
    assert choose(PrefillAttention.FLASHINFER, CONFIG, pool(), timer, timer.now).planner is not None


def test_missing_demanded_flashinfer_is_an_error() -> None:
    with pytest.raises(ModelError, match="prefill-attention: flashinfer cannot be loaded: No module"):
        choose(PrefillAttention.FLASHINFER, CONFIG, pool())


def test_flashinfer_that_does_not_load_leaves_the_choice_to_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*arguments: object) -> None:
        raise OSError("libcudart.so.13 is not here")

    imitated_flashinfer.install(monkeypatch, BatchPrefillWithPagedKVCacheWrapper=broken)
    timer = Timer(2.0, 1.0)
    choice = choose(PrefillAttention.AUTO, CONFIG, pool(), timer, timer.now)
    assert choice.planner is None and choice.by_library and "libcudart" in caplog.messages[0]


def test_chunks_of_a_library_stand_behind_the_others() -> None:
    chunks = [chunk(3, 3), chunk(9, 40), chunk(1, 5), chunk(2, 70), chunk(8, 8)]
    batch = make_batch(chunks, 32, CPU, by_library=lambda each: len(each.token_ids) in (3, 8))
    assert batch.prefills is not None and batch.prefills.by_library == 2
    assert [len(each.block_ids) for each in batch.prefills.chunks] == [2, 3, 1, 1]
    assert [rows.stop - rows.start for rows in batch.chunk_rows] == [3, 9, 1, 2, 8]
    assert [batch.chunk_rows[index].start for index in (2, 1, 3, 0, 4)] == [0, 1, 10, 12, 15]


def test_batches_of_a_runner_follow_its_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imitated_flashinfer.install(monkeypatch)
    paged, compute = PagedModel(make_checkpoint(tmp_path, "llama")), DecoderModel.hidden
    seen: list[PrefillChunks] = []

    def hidden(model: DecoderModel, batch: Batch, kv: KvPages) -> torch.Tensor:
        assert batch.prefills is not None
        seen.append(batch.prefills)
        return compute(model, batch, kv)

    monkeypatch.setattr(DecoderModel, "hidden", hidden)
    planner = FlashInferPrefill(paged.model.config.num_heads, paged.kv.layer(0))
    plan = Plan((Chunk(0, random_prompt(300), 0, paged.blocks(300)),))
    for choice in (OURS, PrefillChoice(frozenset(all_shapes()), planner)):
        paged.runner._prefill = choice
        paged.runner.run(plan)
    ours, planned = seen
    assert (ours.by_library, ours.planned) == (0, None)
    assert planned.by_library == 1 and planned.planned is not None


def test_adapter_rows_stay_together_and_chunks_between_them_use_own_kernels() -> None:
    chunks = [chunk(8, 8, adapter=1), chunk(3, 3), chunk(9, 9), chunk(4, 4, adapter=2)]
    batch = make_batch(chunks, 32, CPU, by_library=lambda each: len(each.token_ids) != 3)
    assert batch.prefills is not None and batch.prefills.by_library == 1
    assert [batch.chunk_rows[index].start for index in (3, 0, 1, 2)] == [0, 4, 12, 15]
    assert batch.adapters is not None and batch.adapters.rows == slice(0, 12)


def test_batch_leaves_nothing_to_a_library_unless_told() -> None:
    batch = make_batch([chunk(300, 300)], 32, CPU)
    assert batch.prefills is not None and batch.prefills.by_library == 0
