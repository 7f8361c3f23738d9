"""What is left of a GPU for KV: arithmetic, and the step that is computed to find out."""

from pathlib import Path

import pytest
import torch

from baton.engine.kv_cache.layout import KvLayout
from baton.engine.kv_cache.memory import LargestStep, largest_plan, prepare_with_spare_memory
from baton.engine.kv_cache.sizing import GPU_RESERVE_BYTES, StepMemory, recorded_logits_bytes, spare_kv_bytes
from baton.engine.models.batch import make_batch
from baton.engine.prepare import ENCODER_TOKENS, ModelOptions
from tests.fixtures.encoders import make_encoder
from tests.fixtures.metered_rank import ToldMeter
from tests.fixtures.paged import CPU

GIB = 1 << 30


@pytest.mark.parametrize(
    ("memory", "utilization", "set_aside", "left"),
    [
        (StepMemory(100 * GIB, 90 * GIB, 9 * GIB, 15 * GIB, GIB), 0.9, 0, 90 * GIB - 14 * GIB - GPU_RESERVE_BYTES),
        (StepMemory(100 * GIB, 90 * GIB, 9 * GIB, 15 * GIB, GIB), 0.5, 0, 50 * GIB - 14 * GIB - GPU_RESERVE_BYTES),
        (StepMemory(100 * GIB, 90 * GIB, 9 * GIB, 15 * GIB, GIB), 0.5, GIB, 49 * GIB - 14 * GIB - GPU_RESERVE_BYTES),
    ],
    ids=["alone", "half", "adapters_to_come"],
)
def test_automatic_pool_is_a_share_of_all_memory(
    memory: StepMemory, utilization: float, set_aside: int, left: int
) -> None:
    assert spare_kv_bytes(memory, utilization, set_aside) == left


def test_memory_of_others_counts_if_it_leaves_less_than_the_share() -> None:
    crowded = StepMemory(100 * GIB, 40 * GIB, 9 * GIB, 15 * GIB, GIB)
    assert spare_kv_bytes(crowded, 0.9) == 41 * GIB - 6 * GIB - GPU_RESERVE_BYTES // 2
    assert spare_kv_bytes(crowded, 0.3) == 30 * GIB - 14 * GIB - GPU_RESERVE_BYTES


def test_nothing_is_left_where_the_weights_take_the_share() -> None:
    assert spare_kv_bytes(StepMemory(24 * GIB, 3 * GIB, 20 * GIB, 22 * GIB, 0), 0.9) <= 0


@pytest.mark.parametrize(
    ("step", "longest", "lengths"),
    [
        (LargestStep(100, 4), 1000, [1, 1, 1, 97]),
        (LargestStep(100, 1), 40, [40, 40, 20]),
        (LargestStep(3, 8), 40, [1, 1, 1]),
    ],
)
def test_measured_step_has_the_largest_tokens_and_samples(step: LargestStep, longest: int, lengths: list[int]) -> None:
    plan = largest_plan(step, KvLayout(1, 1, 16, 1, torch.float32), longest)
    assert [len(chunk.token_ids) for chunk in plan.chunks] == lengths
    assert all(chunk.samples for chunk in plan.chunks)
    assert len(make_batch(plan.chunks, 16, CPU).token_ids) == step.tokens


def test_recorded_steps_keep_logits_of_their_largest_batch_twice() -> None:
    assert recorded_logits_bytes(8, 1000, 2) == 8 * 1000 * 6
    assert recorded_logits_bytes(4096, 1000, 4) == 256 * 1000 * 8


@pytest.mark.parametrize("labels", [None, 1], ids=["vectors", "scores"])
def test_encoder_takes_no_more_of_a_large_memory_than_prompts_have_use_for(labels: int | None, tmp_path: Path) -> None:
    asked = ModelOptions(make_encoder(tmp_path, "bert", labels=labels), CPU, "float32", None, 0, None)
    prepared = prepare_with_spare_memory(asked, LargestStep(20, 3), 0.9, meter=lambda device: ToldMeter(70 * GIB))
    assert prepared.total_blocks * prepared.layout.block_tokens == ENCODER_TOKENS
    assert prepared.max_model_len == prepared.config.max_positions
