"""Whole models on Triton's kernels: quantised weights, experts, and steps in which nothing depends on a number."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from baton.engine.models import linear
from baton.engine.models.batch import make_batch
from baton.engine.models.decoder import DecoderModel
from baton.engine.models.feed_forward import ExpertStack
from baton.engine.models.linear import KernelLinear
from baton.engine.request import Chunk
from baton.engine.runner.cuda_graphs import GraphSizes, RecordedSteps, why_not_recorded
from baton.kernels.dispatch import on_the_interpreter
from baton.kernels.triton.launch import KernelCall
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.mxfp4 import draw_mxfp4
from tests.fixtures.paged import CPU, PagedModel, random_prompt

SMALL: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "head_dim": 16}
SMALL |= {"num_key_value_heads": 1, "intermediate_size": 32}
EXPERTS = {
    "mixtral": SMALL,
    "gpt_oss": {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**SMALL, "num_hidden_layers": 2, "moe_intermediate_size": 32},
    "deepseek_v3": {**SMALL, "num_hidden_layers": 2, "moe_intermediate_size": 32, "num_key_value_heads": 2},
}
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy meets the poison


def answer(folder: Path, quantize: str) -> tuple[PagedModel, list[torch.Tensor]]:
    """Logits of two prompts, then of one more token each."""
    paged, prompts = PagedModel(folder, 8, 16, quantize=quantize), [random_prompt(5), random_prompt(9)]
    tables = [paged.blocks(16) for _ in prompts]
    first = [Chunk(number, prompt, 0, tables[number]) for number, prompt in enumerate(prompts)]
    following = [Chunk(number, [7 + number], len(prompt), tables[number]) for number, prompt in enumerate(prompts)]
    return paged, [*paged.logits(first), *paged.logits(following)]


@pytest.mark.parametrize("quantize", ["fp8", "int4"])
def test_quantised_model_answers_as_with_its_weights_spelled_out(
    quantize: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(tmp_path, "llama", attention_bias=True, **SMALL)
    with on_the_interpreter():
        monkeypatch.setattr(linear, "KERNEL_ROWS", 0)
        _, expected = answer(folder, quantize)
        monkeypatch.setattr(linear, "KERNEL_ROWS", 4)  # the prompts have more
        paged, found = answer(folder, quantize)
    assert isinstance(paged.model, DecoderModel)
    assert all(isinstance(layer.qkv, KernelLinear) for layer in paged.model.layers)
    for ours, spelled in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, spelled, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    ("family", "quantize"),
    [("mixtral", "none"), ("mixtral", "int4"), ("deepseek_v3", "none"), ("gpt_oss", "none"), ("gpt_oss", "mxfp4")],
)
def test_experts_together_answer_as_experts_apart(family: str, quantize: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, family, **EXPERTS.get(family, SMALL))
    if quantize == "mxfp4":
        draw_mxfp4(folder)
    _, expected = answer(folder, quantize)
    with on_the_interpreter():
        paged, found = answer(folder, quantize)
    assert isinstance(paged.model, DecoderModel)
    assert isinstance(paged.model.layers[-1].feed_forward, ExpertStack)
    for ours, apart in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, apart, atol=2e-4, rtol=2e-4)


class Launches(TorchDispatchMode):
    """Notes every operation with the shapes it is given, and refuses those that look at a number on the host."""

    LOOKING = ("item", "_local_scalar_dense", "resolve_conj", "nonzero", "unique", "bincount", "masked_select")
    """`tolist` resolves a conjugate first."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.noted: list[object] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(func) for name in self.LOOKING):
            raise AssertionError(f"{func} waits for the device")
        tensors = [each for each in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if str(func).startswith("aten.index") and any(each.dtype == torch.bool for each in tensors[1:]):
            raise AssertionError(f"{func} by a mask waits for the device")
        self.noted.append((str(func), [tuple(each.shape) for each in tensors]))
        return func(*args, **(kwargs or {}))


class NotingRecorder:
    """Computes again where a GPU replays, and notes what was launched each time."""

    def __init__(self) -> None:
        self.replays: list[list[object]] = []

    def record(self, compute: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        result = compute().clone()

        def replay() -> None:
            with Launches() as launches:
                found = compute()
            self.replays.append(launches.noted)
            result.copy_(found)

        return replay, result


@pytest.fixture
def noted_kernels(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grids of all kernels; what Triton's interpreter does itself is not noted elsewhere."""
    grids: list[object] = []
    start = KernelCall.start

    def noting(call: KernelCall) -> None:
        grids.append((str(call.kernel), call.grid))
        with _disable_current_modes():
            start(call)

    monkeypatch.setattr(KernelCall, "start", noting)
    return grids


@pytest.mark.parametrize(
    ("family", "quantize"),
    [("llama", "fp8"), ("mixtral", "int8"), ("qwen3_moe", "none"), ("deepseek_v3", "fp8"), ("gpt_oss", "none")],
)
def test_launches_of_a_step_do_not_depend_on_its_numbers(
    family: str, quantize: str, tmp_path: Path, noted_kernels: list[object]
) -> None:
    folder = make_checkpoint(tmp_path, family, **EXPERTS.get(family, SMALL))
    steps = [([7, 8, 9], [0, 17, 5]), ([300, 300, 300], [11, 2, 23])]
    with on_the_interpreter(), torch.inference_mode():
        paged, recorder, grids = PagedModel(folder, 8, 16, quantize=quantize), NotingRecorder(), []
        assert why_not_recorded(paged.model) is None
        groups = paged.layout.groups.count
        steps_recorded = RecordedSteps(paged.model, paged.kv, recorder, GraphSizes(3, 3), groups)
        tables = [paged.blocks(24) for _ in range(3)]
        paged.kv.data.normal_()
        for tokens, positions in steps:
            rows = zip(tokens, positions, tables, strict=True)
            chunks = [
                Chunk(number, [token], position, table[: (position // 8 + 1) * groups])
                for number, (token, position, table) in enumerate(rows)
            ]
            batch = make_batch(chunks, 8, CPU, groups=groups)
            noted_kernels.clear()
            step = steps_recorded.find(chunks)
            assert step is not None
            found = steps_recorded.run(step, chunks).clone()
            grids.append(list(noted_kernels))
            torch.testing.assert_close(found, paged.model.hidden(batch, paged.kv), atol=1e-4, rtol=1e-4)
    first, second = recorder.replays
    assert first == second
    assert grids[0] == grids[1] and len(grids[0]) > 6
