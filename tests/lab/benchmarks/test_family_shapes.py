"""The benchmark of families: each is one of our own decoder's, of the Llama's shape; operations are counted."""

from pathlib import Path

import pytest
import torch

from baton.engine.config.config_file import read_model_config
from baton.engine.config.families import FAMILIES
from baton.engine.config.model_config import DecoderConfig
from baton.lab.benchmarks.engine.families import FEATURES, REFERENCE, Operations, family_config


def read(folder: Path, family: str) -> DecoderConfig:
    family_config(family).save_pretrained(folder)
    config = read_model_config(folder)
    assert isinstance(config, DecoderConfig)
    return config


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_multiplies_as_many_numbers_as_the_llama(tmp_path: Path, family: str) -> None:
    own, llama = read(tmp_path / family, family), read(tmp_path / REFERENCE, REFERENCE)
    sizes = ["vocab_size", "hidden_size", "num_layers", "num_heads", "tie_word_embeddings"]
    if own.latent is None:
        sizes += ["num_kv_heads", "head_dim"]
    else:
        assert own.latent.nope_dim + own.latent.rope_dim == own.latent.value_dim == llama.head_dim
    assert [getattr(own, size) for size in sizes] == [getattr(llama, size) for size in sizes]
    experts = own.experts
    inner = (
        own.intermediate_size
        if experts is None
        else experts.routing.per_token * experts.inner_size + experts.shared_size
    )
    assert inner == llama.intermediate_size


def test_only_families_have_features() -> None:
    assert set(FEATURES) <= set(FAMILIES)


def test_operations_are_counted_and_views_are_not() -> None:
    numbers = torch.ones(2, 3)
    with Operations() as counted:
        numbers.view(3, 2).mul(2).add(1)
    assert counted.count == 2
