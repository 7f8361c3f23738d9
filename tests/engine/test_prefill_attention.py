"""Which attention computes prompts: what follows from times, how they are taken, and what a batch makes of it."""

import logging
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from baton.engine.config.model_config import ModelConfig
from baton.engine.kv_cache.layout import KvLayout
from baton.engine.models.batch import make_batch
from baton.engine.request import Chunk
from baton.engine.runner import prefill_attention
from baton.engine.runner.prefill_attention import (
    BUDGET_S,
    IN_PLACE,
    ChunkShape,
    PrefillAttention,
    PrefillChoice,
    Timed,
    all_shapes,
    choose,
    decide,
    gathered_bytes,
)
from baton.kernels.types import KvPages
from tests.fixtures.paged import CPU

CONFIG = ModelConfig("llama", 512, 64, 128, 1, 4, 2, 16, 20_000, frozenset())


def chunk(tokens: int, end: int, adapter: int = 0) -> Chunk:
    table = list(range(-(-end // 32)))
    return Chunk(0, [1] * tokens, end - tokens, table, adapter=adapter)


def pool(blocks: int = 128, dtype: torch.dtype = torch.bfloat16) -> KvPages:
    layout = KvLayout(1, CONFIG.num_kv_heads, 32, CONFIG.head_dim, dtype)
    return layout.view(torch.zeros(blocks * layout.block_bytes, dtype=torch.uint8), blocks)


class Timer:
    """Says what each call took, in place and gathered in turn, and that some time has passed; computes nothing."""

    def __init__(self, in_place_s: float, gathered_s: float | None, pause_s: float = 0.0) -> None:
        self.calls, self.now_s = 0, 0.0
        self._times_s, self._pause_s = (in_place_s, gathered_s), pause_s

    def __call__(self, call: Callable[[], object]) -> float:
        self.now_s += self._pause_s
        took_s = self._times_s[self.calls % 2]
        self.calls += 1
        if took_s is None:
            raise RuntimeError("no kernel for these heads")
        return took_s

    def now(self) -> float:
        return self.now_s


def test_a_shape_is_gathered_where_that_is_clearly_faster() -> None:
    short, even, long = ChunkShape(256, 1024), ChunkShape(1024, 1024), ChunkShape(1024, 4096)
    choice = decide([Timed(short, 1.0, 2.0), Timed(even, 1.0, 0.96), Timed(long, 1.0, 0.9)])
    assert choice == PrefillChoice(frozenset({long}))
    assert decide([]) == decide([Timed(long, 1.0, math.inf)]) == IN_PLACE


@pytest.mark.parametrize(
    ("tokens", "end", "gathers"),
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
def test_a_chunk_is_gathered_as_at_the_measured_shape_with_fewer_tokens_in_a_longer_context(
    tokens: int, end: int, gathers: bool
) -> None:
    choice = PrefillChoice(frozenset({ChunkShape(1024, 4096), ChunkShape(4096, 4096)}))
    assert choice.gathers(chunk(tokens, end)) is gathers


def test_both_are_measured_at_every_shape_that_the_pool_has_room_for(caplog: pytest.LogCaptureFixture) -> None:
    timer = Timer(2.0, 1.0)
    with caplog.at_level(logging.INFO, logger=prefill_attention.__name__):
        choice = choose(PrefillAttention.AUTO, CONFIG, pool(128), timer, timer.now)
    assert choice.gathered == {shape for shape in all_shapes() if shape.context <= 4096}
    assert timer.calls == 2 * len(choice.gathered) == 10
    [said] = caplog.messages
    assert "256 of 1024, 256 of 4096" in said and "measured at 5 shapes" in said


def test_measuring_ends_when_its_time_is_over() -> None:
    timer = Timer(2.0, 1.0, pause_s=0.4 * BUDGET_S)
    assert choose(PrefillAttention.AUTO, CONFIG, pool(), timer, timer.now).gathered == set(list(all_shapes())[:2])


def test_a_kernel_that_fails_is_never_taken(caplog: pytest.LogCaptureFixture) -> None:
    timer = Timer(2.0, None)
    assert choose(PrefillAttention.AUTO, CONFIG, pool(32), timer, timer.now) == IN_PLACE
    assert "no kernel for these heads" in caplog.messages[0]


def test_what_is_measured_computes_and_writes_nothing_to_the_pool() -> None:
    kv, results = pool(32), []

    def timer(call: Callable[[], object]) -> float:
        results.append(call())
        return 1.0

    kv.data.normal_()
    before = kv.data.clone()
    choose(PrefillAttention.AUTO, CONFIG, kv, timer)
    assert len(results) == 4 and torch.equal(kv.data, before)


def test_a_choice_that_is_asked_for_is_not_measured() -> None:
    timer = Timer(1.0, 1.0)
    assert choose(PrefillAttention.TRITON, CONFIG, pool(), timer, timer.now) == IN_PLACE
    assert choose(PrefillAttention.SDPA, CONFIG, pool(), timer, timer.now).gathers(chunk(300, 16384))
    assert timer.calls == 0


@pytest.mark.parametrize("asked", PrefillAttention)
def test_a_quantised_pool_is_read_in_place(asked: PrefillAttention) -> None:
    timer = Timer(2.0, 1.0)
    assert choose(asked, CONFIG, pool(dtype=torch.int8), timer, timer.now) == IN_PLACE
    assert timer.calls == 0


def test_a_device_without_such_a_kernel_reads_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_attention, "is_fast_gathered", lambda heads, kv: False)
    timer = Timer(2.0, 1.0)
    assert choose(PrefillAttention.SDPA, CONFIG, pool(), timer, timer.now) == IN_PLACE


def test_the_memory_of_a_gathered_chunk_is_that_of_keys_values_and_results() -> None:
    assert gathered_bytes(CONFIG, torch.bfloat16) == (2 * 2 * 16384 + 4 * 4096) * 16 * 2
    short = replace(CONFIG, max_positions=100)
    assert gathered_bytes(short, torch.float32) == (2 * 2 * 100 + 4 * 100) * 16 * 4


def test_chunks_that_are_gathered_stand_behind_the_others() -> None:
    chunks = [chunk(3, 3), chunk(9, 40), chunk(1, 5), chunk(2, 70), chunk(8, 8)]
    batch = make_batch(chunks, 32, CPU, gathers=lambda each: len(each.token_ids) in (3, 8))
    assert batch.prefills is not None and batch.prefills.gathered == 2
    assert [len(each.block_ids) for each in batch.prefills.chunks] == [2, 3, 1, 1]
    assert [rows.stop - rows.start for rows in batch.chunk_rows] == [3, 9, 1, 2, 8]
    assert [batch.chunk_rows[index].start for index in (2, 1, 3, 0, 4)] == [0, 1, 10, 12, 15]


def test_rows_with_an_adapter_stay_side_by_side_and_chunks_between_them_are_read_in_place() -> None:
    chunks = [chunk(8, 8, adapter=1), chunk(3, 3), chunk(9, 9), chunk(4, 4, adapter=2)]
    batch = make_batch(chunks, 32, CPU, gathers=lambda each: len(each.token_ids) != 3)
    assert batch.prefills is not None and batch.prefills.gathered == 1
    assert [batch.chunk_rows[index].start for index in (3, 0, 1, 2)] == [0, 4, 12, 15]
    assert batch.adapters is not None and batch.adapters.rows == slice(0, 12)


def test_a_batch_gathers_nothing_unless_told() -> None:
    batch = make_batch([chunk(300, 300)], 32, CPU)
    assert batch.prefills is not None and batch.prefills.gathered == 0
