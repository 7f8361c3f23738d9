"""Adapters on models that run through transformers' own code, against merged weights, mixed in one batch."""

from pathlib import Path

import pytest
import torch

from baton.engine.lora.adapters import AdapterSet
from baton.engine.lora.files import read_adapter
from baton.engine.models.transformers_model import TransformersModel
from baton.engine.request import Chunk
from tests.fixtures.adapters import make_adapter, merged_model
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import PagedModel, random_prompt

TARGETS = {
    "gpt2": ("c_attn", "c_fc"),
    "phi": ("q_proj", "dense", "fc2"),
    "opt": ("k_proj", "out_proj", "fc1"),
}


@pytest.mark.parametrize("family", TARGETS)
def test_batch_of_base_and_adapters_equals_merged_weights(family: str, tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", family)
    one = make_adapter(tmp_path / "one", base, 1, rank=3, targets=TARGETS[family][:1])
    all_targets = make_adapter(tmp_path / "all", base, 2, rank=8, targets=TARGETS[family], fan_in_fan_out=True)
    adapters = AdapterSet()
    paged = PagedModel(base, adapters=adapters)
    assert isinstance(paged.model, TransformersModel)
    for folder in (one, all_targets):
        adapters.add(folder.name, read_adapter(folder))
    chosen, prompts = (2, 0, 1), [random_prompt(length) for length in (40, 33, 21)]
    tables = [paged.blocks(len(prompt)) for prompt in prompts]
    first = [Chunk(i, p[:-1], 0, tables[i], adapter=chosen[i]) for i, p in enumerate(prompts)]
    last = [Chunk(i, p[-1:], len(p) - 1, tables[i], adapter=chosen[i]) for i, p in enumerate(prompts)]
    results = [torch.cat(parts) for parts in zip(paged.logits(first), paged.logits(last), strict=True)]
    expected = [merged_model(base, folder) for folder in (None, one, all_targets)]
    for logits, number, prompt in zip(results, chosen, prompts, strict=True):
        with torch.inference_mode():
            wanted = [model(torch.tensor([prompt])).logits[0] for model in expected]
        torch.testing.assert_close(logits, wanted[number], atol=5e-4, rtol=0)
        assert all((wanted[other] - logits).abs().max() > 0.05 for other in range(3) if other != number)
