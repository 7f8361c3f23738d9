"""Adapters against transformers with their products added to the weights, in float32, mixed in one batch."""

from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.config.model_config import ModelError
from baton.engine.lora.adapters import AdapterSet
from baton.engine.lora.files import read_adapter
from baton.engine.request import Chunk
from tests.fixtures.adapters import ALL_PROJECTIONS, make_adapter, merged_model
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import PagedModel, random_prompt

ADAPTERS: dict[str, dict[str, Any]] = {
    "attention": {"rank": 4, "targets": ("q_proj", "v_proj")},
    "everything": {"rank": 16, "targets": ALL_PROJECTIONS, "alpha": 8},
    "rank_stabilised": {"rank": 8, "targets": ("o_proj", "gate_proj", "down_proj"), "alpha": 4, "use_rslora": True},
    "patterns": {
        "rank": 2,
        "targets": ("k_proj", "up_proj"),
        "rank_pattern": {"layers.1.self_attn.k_proj": 5, ".*up_proj": 3},
        "alpha_pattern": {r"model\.layers\.[02]\..*": 3.5},
    },
}


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp(request.param) / "base", request.param)


@pytest.fixture(scope="module")
def folders(checkpoint: Path) -> dict[str, Path]:
    return {
        name: make_adapter(checkpoint.parent / name, checkpoint, seed, **fields)
        for seed, (name, fields) in enumerate(ADAPTERS.items())
    }


@pytest.fixture(scope="module")
def expected(checkpoint: Path, folders: dict[str, Path]) -> list[Any]:
    """By number of the adapter; the base model first."""
    return [merged_model(checkpoint, folder) for folder in (None, *folders.values())]


def adapted(checkpoint: Path, folders: dict[str, Path]) -> PagedModel:
    adapters = AdapterSet()
    paged = PagedModel(checkpoint, adapters=adapters)
    for name, folder in folders.items():
        adapters.add(name, read_adapter(folder))
    return paged


def logits_of(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([prompt])).logits[0]
    return logits


def test_batch_of_all_adapters_equals_merged_weights(
    checkpoint: Path, folders: dict[str, Path], expected: list[Any]
) -> None:
    paged = adapted(checkpoint, folders)
    order = [3, 0, 1, 4, 0, 2, 1]
    prompts = [random_prompt(20 + 7 * index) for index in range(len(order))]
    tables = [paged.blocks(len(prompt)) for prompt in prompts]
    begins = [len(prompt) - (1 if index % 2 else 5) for index, prompt in enumerate(prompts)]  # decode and prefill mixed
    chunks = [
        [
            Chunk(index, prompt[part], part.start, tables[index], adapter=adapter)
            for part in (slice(0, begin), slice(begin, len(prompt)))
        ]
        for index, (prompt, adapter, begin) in enumerate(zip(prompts, order, begins, strict=True))
    ]
    first, last = (paged.logits([each[part] for each in chunks]) for part in (0, 1))
    for index, (prompt, adapter) in enumerate(zip(prompts, order, strict=True)):
        wanted = logits_of(expected[adapter], prompt)
        torch.testing.assert_close(torch.cat((first[index], last[index])), wanted, atol=2e-4, rtol=0)


def test_adapters_change_the_answer(checkpoint: Path, expected: list[Any]) -> None:
    """Else the test above would pass without any."""
    prompt = random_prompt(30)
    all_logits = [logits_of(model, prompt) for model in expected]
    for index, logits in enumerate(all_logits):
        for other in all_logits[:index]:
            assert (logits - other).abs().max() > 0.5


def test_rows_without_adapter_are_bitwise_unchanged(checkpoint: Path, folders: dict[str, Path]) -> None:
    with_adapters, without = adapted(checkpoint, folders), PagedModel(checkpoint)
    prompts = [random_prompt(40), random_prompt(33)]
    results = []
    for paged, adapter in ((with_adapters, 2), (without, 0)):
        tables = [paged.blocks(len(prompt)) for prompt in prompts]
        chunks = [Chunk(0, prompts[0], 0, tables[0], adapter=adapter), Chunk(1, prompts[1], 0, tables[1])]
        results.append(paged.logits(chunks))
    assert torch.equal(results[0][1], results[1][1])
    assert not torch.equal(results[0][0], results[1][0])


def test_bfloat16_stays_near_float32(checkpoint: Path, folders: dict[str, Path], expected: list[Any]) -> None:
    adapters = AdapterSet()
    paged = PagedModel(checkpoint, dtype=torch.bfloat16, adapters=adapters)
    number = adapters.add("everything", read_adapter(folders["everything"]))
    prompt = random_prompt(50)
    [logits] = paged.logits([Chunk(0, prompt, 0, paged.blocks(50), adapter=number)])
    near = logits_of(expected[2], prompt)
    assert (logits - near).abs().mean() / near.abs().mean() < 0.1


def test_attention_of_a_mixture_of_experts_is_adapted(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "mixtral")
    folder = make_adapter(tmp_path / "adapter", base, 1, rank=5, targets=("q_proj", "v_proj", "o_proj"))
    adapters = AdapterSet()
    paged = PagedModel(base, adapters=adapters)
    number, prompt = adapters.add("attention", read_adapter(folder)), random_prompt(40)
    [logits] = paged.logits([Chunk(0, prompt, 0, paged.blocks(40), adapter=number)])
    torch.testing.assert_close(logits, logits_of(merged_model(base, folder), prompt), atol=2e-4, rtol=0)


def test_adapters_change_quantised_weights_too(checkpoint: Path, folders: dict[str, Path], expected: list[Any]) -> None:
    prompt = random_prompt(40)
    adapters = AdapterSet()
    paged = PagedModel(checkpoint, adapters=adapters, quantize="int8")
    number = adapters.add("everything", read_adapter(folders["everything"]))
    for chosen, model in ((number, expected[2]), (0, expected[0])):
        [logits] = paged.logits([Chunk(0, prompt, 0, paged.blocks(40), adapter=chosen)])
        near = logits_of(model, prompt)
        assert (logits - near).abs().mean() / near.abs().mean() < 0.1


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("lfm2", ("in_proj", "out_proj", "q_proj", "w1", "w2")),
        ("granitemoehybrid", ("in_proj", "out_proj", "o_proj", "input_linear", "output_linear")),
        ("nemotron_h", ("in_proj", "out_proj", "v_proj")),
        ("qwen3_5_text", ("in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj")),
    ],
)
def test_adapter_of_a_hybrid_model_equals_merged_weights(
    family: str, targets: tuple[str, ...], packed: bool, tmp_path: Path
) -> None:
    base = make_checkpoint(tmp_path / "base", family)
    adapters = AdapterSet()
    paged, prompt = PagedModel(base, adapters=adapters, packed=packed), random_prompt(40)
    folder = make_adapter(tmp_path / "adapter", base, 3, rank=4, targets=targets)
    number, table = adapters.add("some", read_adapter(folder)), paged.blocks(40)
    ends = ((0, 35), (35, 39), (39, 40))
    parts = [paged.logits([Chunk(0, prompt[start:end], start, table, adapter=number)])[0] for start, end in ends]
    torch.testing.assert_close(torch.cat(parts), logits_of(merged_model(base, folder), prompt), atol=3e-4, rtol=0)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("deepseek_v2", ("q_proj", "kv_a_proj_with_mqa", "o_proj")),
        ("deepseek_v3", ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")),
    ],
)
def test_adapters_of_latent_attention_equal_merged_weights_except_absorbed_ones(
    family: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    base = make_checkpoint(tmp_path / "base", family)
    adapters = AdapterSet()
    paged, prompt = PagedModel(base, adapters=adapters), random_prompt(40)
    folder = make_adapter(tmp_path / "adapter", base, 3, rank=4, targets=targets)
    number, table = adapters.add("some", read_adapter(folder)), paged.blocks(40)
    ends = ((0, 35), (35, 39), (39, 40))
    parts = [paged.logits([Chunk(0, prompt[start:end], start, table, adapter=number)])[0] for start, end in ends]
    torch.testing.assert_close(torch.cat(parts), logits_of(merged_model(base, folder), prompt), atol=3e-4, rtol=0)
    absorbed = make_adapter(tmp_path / "absorbed", base, 3, rank=4, targets=("kv_b_proj",))
    with pytest.raises(ModelError, match=r"changes model\.layers\.0\.self_attn\.kv_b_proj, which this model"):
        adapters.add("absorbed", read_adapter(absorbed))
