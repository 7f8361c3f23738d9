"""How far bf16 may be from fp32, stated: in decode's few rows and in prefill's many, which other kernels compute.

Both have the same bf16 weights, so that only the arithmetic differs. A number is off by 2^-9 of itself at most where it
is rounded to bf16, and what layers add that err independently grows with the square root of their number. Hence the
measure: root mean square of the error over that of the logits, in units of 2^-9 * sqrt(layers). transformers in bf16
has 3 to 10 of these units on these models, PyTorch's own kernels here the same, and the native ones, which keep sums
and the residual stream in fp32, half as many.
"""

from pathlib import Path

import pytest
import torch

from baton.engine.request import Chunk
from tests.fixtures.checkpoints import SIZES, make_checkpoint
from tests.fixtures.paged import PagedModel, random_prompt

UNIT = 2**-9 * SIZES["num_hidden_layers"] ** 0.5
BOUND_PYTORCH, BOUND_NATIVE = 14 * UNIT, 8 * UNIT
MANY_TOKENS, FEW_TOKENS, SEQUENCES = 96, 20, 3


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3", "mistral"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("bf16"), request.param, dtype="bfloat16")


def prefilled(model: PagedModel) -> torch.Tensor:
    """Of every position of three prompts, each in one step; [positions][vocabulary]."""
    prompts = [random_prompt(MANY_TOKENS, seed=seed) for seed in range(SEQUENCES)]
    return torch.cat([model.logits([Chunk(0, prompt, 0, model.blocks(MANY_TOKENS))])[0] for prompt in prompts])


def decoded(model: PagedModel) -> torch.Tensor:
    """Of every position of three sequences, three rows a step; [positions][vocabulary]."""
    prompts = [random_prompt(FEW_TOKENS, seed=seed) for seed in range(SEQUENCES)]
    tables = [model.blocks(FEW_TOKENS) for _ in prompts]
    logits: list[torch.Tensor] = []
    for place in range(FEW_TOKENS):
        rows = [Chunk(index, [prompt[place]], place, tables[index]) for index, prompt in enumerate(prompts)]
        logits += model.logits(rows)
    return torch.cat(logits)


def error(measured: torch.Tensor, exact: torch.Tensor) -> float:
    return float((measured.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def errors(folder: Path, packed: bool) -> list[float]:
    exact, rounded = (PagedModel(folder, dtype=dtype, packed=packed) for dtype in (torch.float32, torch.bfloat16))
    return [error(logits(rounded), logits(exact)) for logits in (decoded, prefilled)]


def test_logits_of_pytorchs_bf16_are_within_the_bound(folder: Path) -> None:
    assert all(0 < each < BOUND_PYTORCH for each in errors(folder, packed=False))


@pytest.mark.usefixtures("native_kernels")
def test_logits_of_native_bf16_are_within_a_closer_bound(folder: Path) -> None:
    assert all(0 < each < BOUND_NATIVE for each in errors(folder, packed=True))
