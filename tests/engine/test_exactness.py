"""The decoder against transformers in float32, for every family that it computes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.engine.request import Chunk
from tests.fixtures.checkpoints import DECODERS, make_checkpoint
from tests.fixtures.paged import PagedModel, random_prompt, unlikely

LENGTHS = (1, 31, 32, 33, 100)


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in DECODERS},
    "llama3_rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "linear_rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}, "attention_bias": True},
    ),
    "granite4_without_experts": (
        "granitemoehybrid",
        {"num_local_experts": 0, "num_experts_per_tok": 0, "mamba_conv_bias": False, "mamba_proj_bias": True},
    ),
    "granite4_without_mamba": (
        "granitemoehybrid",
        {
            "num_local_experts": 0,
            "layer_types": ["full_attention"] * 4,
            "position_embedding_type": "rope",
            "tie_word_embeddings": True,
        },
    ),
    "lfm2_without_bias": ("lfm2", {"conv_bias": False, "block_auto_adjust_ff_dim": False}),
    "lfm2_moe_dense": ("lfm2_moe", {"num_dense_layers": 4}),
    "nemotron_h_with_biases": ("nemotron_h", {"use_bias": True, "use_conv_bias": False, "time_step_min": 0.5}),
    "gemma4_values": (  # keys that are values too, no embeddings per layer, no shared layers
        "gemma4_text",
        {
            "attention_k_eq_v": True,
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "use_double_wide_mlp": False,
        },
    ),
    "gemma3n_second": ("gemma3n_text", {"altup_active_idx": 1, "altup_correct_scale": False, "altup_num_inputs": 3}),
    "qwen2_windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2}),
}


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, overrides = VARIANTS[request.param]
    return make_checkpoint(tmp_path_factory.mktemp(request.param), family, **overrides)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def expected_logits(expected: Any) -> dict[int, torch.Tensor]:
    """Of the prompt of each length."""
    with torch.inference_mode():
        return {length: expected(torch.tensor([random_prompt(length)])).logits[0] for length in LENGTHS}


@pytest.mark.parametrize("chunk_tokens", [1000, 7], ids="chunks_of_{}".format)
def test_logits_equal_transformers(
    checkpoint: Path, expected_logits: dict[int, torch.Tensor], chunk_tokens: int
) -> None:
    paged = PagedModel(checkpoint)
    for length in LENGTHS:
        prompt, table = random_prompt(length), paged.blocks(length)
        parts = []
        for start in range(0, length, chunk_tokens):
            parts += paged.logits([Chunk(0, prompt[start : start + chunk_tokens], start, table)])
        torch.testing.assert_close(torch.cat(parts), expected_logits[length], atol=1e-4, rtol=0)


def test_one_step_of_mixed_chunks_equals_each_alone(checkpoint: Path, expected_logits: dict[int, torch.Tensor]) -> None:
    paged = PagedModel(checkpoint)
    prompts = [random_prompt(length) for length in LENGTHS]
    tails = []
    for index, prompt in enumerate(prompts):
        table = paged.blocks(len(prompt))
        start = max(0, len(prompt) - 1 - index % 2 * 4)  # tails of one and of five tokens
        if start:
            paged.logits([Chunk(index, prompt[:start], 0, table)])
        tails.append(Chunk(index, prompt[start:], start, table))
    for length, logits in zip(LENGTHS, paged.logits(tails), strict=True):
        torch.testing.assert_close(logits[-1], expected_logits[length][-1], atol=1e-4, rtol=0)


def test_greedy_continuations_equal_generate(checkpoint: Path, expected: Any) -> None:
    """In blocks that divide nothing; those above are of the usual size."""
    steps, block_tokens = 24, 5
    prompts = [random_prompt(length, seed=1) for length in LENGTHS]
    paged = PagedModel(checkpoint, block_tokens, blocks=512 // block_tokens + 8)
    continued = paged.greedy(prompts, steps, chunk_tokens=30)
    for prompt, tokens in zip(prompts, continued, strict=True):
        assert unlikely(expected, prompt, tokens) == []


def test_bfloat16_stays_near_float32(checkpoint: Path, expected: Any) -> None:
    prompt = random_prompt(50)
    paged = PagedModel(checkpoint, dtype=torch.bfloat16)
    table = paged.blocks(50)
    first = paged.logits([Chunk(0, prompt[:-1], 0, table)])
    last = paged.logits([Chunk(0, prompt[-1:], 49, table)])
    with torch.inference_mode():
        near = expected(torch.tensor([prompt])).logits[0]
    difference = (torch.cat(first + last) - near).abs().mean() / near.abs().mean()
    assert difference < 0.1
