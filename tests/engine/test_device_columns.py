"""All that a GPU's kernels read is on that GPU, and no step waits for it: neither to read of it nor to copy to it.

The loader, the steps of a warm-up, recorded steps and usual ones run on tensors of shapes alone.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.kv_cache.layout import kv_layout
from baton.engine.load import load_model
from baton.engine.lora.adapters import AdapterSet
from baton.engine.lora.files import LoraWeights, LowRank
from baton.engine.models.batch import Model
from baton.engine.request import Chunk, Plan, Sample
from baton.engine.runner.cuda_graphs import GraphSizes, RecordedSteps, why_not_recorded
from baton.engine.runner.runner import Runner, warm_up_plans
from baton.engine.sampling.params import SamplingParams
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.encoders import make_encoder
from tests.fixtures.shaped_gpu import CUDA, ShapedGpu, shaped_gpu

pytest.importorskip("triton")
BLOCKS, ROWS, RECORDED, LONGEST = 64, 80, GraphSizes(4, 4), 256
TWO_LAYERS: dict[str, Any] = {"num_hidden_layers": 2}
SHAPES = {"qwen3_next": {**TWO_LAYERS, "layer_types": ["linear_attention", "full_attention"], "mlp_only_layers": []}}
DRAWN = (Sample(0, SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9)),)
SEVERAL = tuple(Sample(choice, SamplingParams(max_tokens=1)) for choice in range(2))


class CallRecorder:
    """Runs what is recorded twice, as a GPU's does: before, and while it records."""

    def record(self, compute: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        compute()
        return lambda: None, compute()


class Loaded:
    def __init__(self, gpu: ShapedGpu, folder: Path, kv_dtype: torch.dtype | None, adapters: AdapterSet | None) -> None:
        self.gpu = gpu
        self.model: Model = load_model(folder, torch.bfloat16, CUDA, progress=False, adapters=adapters)
        self.layout = kv_layout(self.model.config, kv_dtype or torch.bfloat16, None)
        storage = torch.empty(BLOCKS * self.layout.block_bytes, dtype=torch.uint8, device=CUDA)
        self.kv = self.layout.view(storage, BLOCKS)
        self.runner = Runner(self.model, self.layout, self.kv)

    def chunk(self, number: int, tokens: int, start: int, samples: tuple[Sample, ...] = DRAWN, **more: Any) -> Chunk:
        columns = -(-(start + tokens) // self.layout.block_tokens)
        return Chunk(number, [1] * tokens, start, list(range(columns * self.layout.groups.count)), samples, **more)

    def warm_up(self) -> None:
        longest = min(self.model.config.max_positions, LONGEST)
        with self.gpu.never_waits():
            for plan in warm_up_plans(self.layout.block_tokens, longest, True, self.layout.groups.count):
                self.runner.launch(plan)

    def record(self) -> None:
        RecordedSteps(self.model, self.kv, CallRecorder(), RECORDED, self.layout.groups.count)

    def step(self) -> None:
        """Of many answers, then one that follows them beside prompts over several blocks."""
        with self.gpu.never_waits():
            first = self.runner.launch(Plan(tuple(self.chunk(row, 1, 5) for row in range(ROWS))))
            prompts = self.chunk(1, 80, 0, SEVERAL), self.chunk(2, 40, 16, ())
            self.runner.launch(Plan((self.chunk(0, 1, 6, follows=3), *prompts)), first)


@pytest.mark.parametrize(
    ("family", "kv_dtype", "recorded"),
    [
        ("llama", None, True),
        ("qwen3", torch.float8_e4m3fn, True),
        ("qwen3_moe", None, True),
        ("gpt_oss", None, True),
        ("deepseek_v3", None, True),
        ("qwen3_next", None, False),
    ],
    ids=["llama", "quantised KV", "experts", "windows", "latent", "states"],
)
def test_kernels_read_device_memory_alone_and_no_step_waits(
    family: str, kv_dtype: torch.dtype | None, recorded: bool, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, family, **SHAPES.get(family, TWO_LAYERS))
    with shaped_gpu() as gpu:
        loaded = Loaded(gpu, folder, kv_dtype, None)
        loaded.warm_up()
        assert (why_not_recorded(loaded.model) is None) == recorded
        if recorded:
            loaded.record()
        loaded.step()
        assert len(set(gpu.started)) > 5


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_rows_with_adapters_wait_for_nothing_either(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, family, **SHAPES.get(family, TWO_LAYERS))
    with shaped_gpu() as gpu:
        adapters = AdapterSet()
        loaded = Loaded(gpu, folder, None, adapters)
        for rank in (4, 8):
            factors = {
                name: LowRank(torch.zeros(rank, stacked.shape[1]), torch.zeros(stacked.shape[0], rank), 2.0)
                for name, stacked in adapters._modules.items()
            }
            adapters.add("adapter", LoraWeights(factors))
        rows = loaded.chunk(0, 1, 5, adapter=1), loaded.chunk(1, 1, 5), loaded.chunk(2, 40, 0, adapter=2)
        with gpu.never_waits():
            loaded.runner.launch(Plan(rows))
        adapters.remove(1)


def test_classification_head_is_warmed_up_without_recorded_steps(tmp_path: Path) -> None:
    folder = make_encoder(tmp_path, "llama", labels=1)
    with shaped_gpu() as gpu:
        loaded = Loaded(gpu, folder, None, None)
        loaded.warm_up()
        assert why_not_recorded(loaded.model) is not None


def test_waits_are_noticed() -> None:
    with shaped_gpu() as gpu:
        with pytest.raises(AssertionError, match=r"copies of \[2\] torch.int64 to the GPU"), gpu.never_waits():
            torch.tensor([1, 2], device=CUDA)
        held = torch.zeros(3, device=CUDA)
        with pytest.raises(AssertionError, match=r"copies of \[3\] torch.float32 to the host"), gpu.never_waits():
            held.cpu()
        with pytest.raises(RuntimeError):
            held.tolist()
        with pytest.raises(RuntimeError):
            held + torch.zeros(3)
