"""How much of a GPU the engine takes; nothing else may use it meanwhile."""

from pathlib import Path

import pytest
import torch

from baton.engine.config.model_config import ModelError
from baton.engine.kv_cache.memory import LargestStep, prepare_with_spare_memory
from baton.engine.prepare import ModelOptions
from tests.fixtures.checkpoints import make_checkpoint
from tests.gpu.device import CUDA, needs_gpu

pytestmark = needs_gpu


def test_pool_is_the_memory_left_by_weights_and_the_largest_step(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "llama")
    asked = ModelOptions(checkpoint, CUDA, "bfloat16", 32, 0, None)
    free_before, total = torch.cuda.mem_get_info(CUDA)
    share = 0.5 * free_before / total
    prepared = prepare_with_spare_memory(asked, LargestStep(2048, 64), share)
    assert 0.5 * share * total < prepared.pool_bytes < share * total
    storage = torch.zeros(prepared.pool_bytes, dtype=torch.uint8, device=CUDA)
    prepared.load(storage, progress=False, decode_rows=64).warm_up()
    assert free_before - torch.cuda.mem_get_info(CUDA)[0] < share * total
    with pytest.raises(ModelError, match="leaves no room"):
        prepare_with_spare_memory(asked, LargestStep(2048, 64), 1e-4)
