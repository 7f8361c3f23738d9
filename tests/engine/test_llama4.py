"""Llama 4: what its attention in chunks and its order of queries and keys demand of the rest of the engine."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.engine.config.config_file import read_model_config
from baton.engine.config.model_config import ModelError
from baton.engine.kv_cache.layout import kv_layout
from baton.engine.lora.adapters import AdapterSet
from baton.engine.lora.files import LoraWeights, LowRank
from baton.engine.models.batch import make_batch
from baton.engine.models.positions import chunk_rows
from baton.engine.request import Chunk
from baton.engine.weights.pairs import PairsApart
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import CPU, PagedModel, random_prompt, unlikely

CHUNK, BLOCK = 40, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama4"), "llama4_text", attention_chunk_size=CHUNK)


def test_block_size_that_does_not_divide_attention_chunks_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match="block-size 16 does not divide attention_chunk_size 40 of llama4_text"):
        kv_layout(read_model_config(folder), torch.float32, 16)


@pytest.mark.parametrize("packed", [False, True])
def test_answers_across_attention_chunks_equal_transformers(folder: Path, packed: bool) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [random_prompt(length) for length in (1, 39, 40, 41, 100)]
    answers = PagedModel(folder, BLOCK, blocks=128, packed=packed).greedy(prompts, 24, chunk_tokens=30)
    assert [unlikely(model, *each) for each in zip(prompts, answers, strict=True)] == [[]] * len(prompts)


def test_decode_rows_of_chunked_layers_have_the_blocks_of_their_own_chunk() -> None:
    contexts = (40, 41, 83, 3)
    tables = [list(range(20 * index, 20 * index + 11)) for index in range(len(contexts))]
    chunks = [Chunk(index, [5], tokens - 1, tables[index]) for index, tokens in enumerate(contexts)]
    rows = chunk_rows(make_batch(chunks, BLOCK, CPU).groups[0], CHUNK, BLOCK).decode
    assert rows is not None
    assert rows.context_tokens.tolist() == [40, 1, 3, 3]
    starts = rows.block_starts.tolist()
    own = [rows.block_ids[begin:end].tolist() for begin, end in itertools.pairwise(starts)]
    assert own == [[0, 1, 2, 3, 4], [25], [50], [60]]


def test_prompt_chunks_of_chunked_layers_end_where_an_attention_chunk_ends() -> None:
    batch = make_batch([Chunk(0, [5] * 60, 30, list(range(12)))], BLOCK, CPU)
    prefills = chunk_rows(batch.groups[0], CHUNK, BLOCK).prefills
    assert prefills is not None
    assert [(piece.rows, piece.start, piece.block_ids.tolist()) for piece in prefills.chunks] == [
        (slice(0, 10), 30, [0, 1, 2, 3, 4]),
        (slice(10, 50), 0, [5, 6, 7, 8, 9]),
        (slice(50, 60), 0, [10, 11]),
    ]
    assert prefills.row_starts.tolist() == [0, 10, 50, 60]
    assert prefills.ends.tolist() == [40, 40, 10]
    assert prefills.block_starts.tolist() == [0, 5, 10, 12]


def test_adapter_of_reordered_projections_equals_transformers(folder: Path) -> None:
    prompt, generator = random_prompt(60), torch.Generator().manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    factors = {}
    for name in ("q_proj", "k_proj"):
        module = f"model.layers.0.self_attn.{name}"
        weight = model.get_submodule(module).weight
        down, up = (torch.randn(size, generator=generator) for size in ((2, 64), (len(weight), 2)))
        factors[module] = LowRank(down, up, 0.1)
        weight.data += 0.1 * up @ down
    adapters = AdapterSet()
    paged = PagedModel(folder, BLOCK, adapters=adapters)
    number = adapters.add("one", LoraWeights(factors))
    [logits] = paged.logits([Chunk(0, prompt, 0, paged.blocks(60), adapter=number)])
    with torch.inference_mode():
        torch.testing.assert_close(logits, model(torch.tensor([prompt])).logits[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize(("kind", "rows"), [("weight_scale_inv", 64), ("weight_scale", 2)])
def test_queries_quantised_in_blocks_are_refused_by_name(kind: str, rows: int) -> None:
    class Stored:
        def has(self, name: str) -> bool:
            return True

        def shape(self, name: str) -> tuple[int, ...]:
            return (64, 1)

        def take(self, name: str, dtypes: tuple[torch.dtype, ...], *shape: int) -> torch.Tensor:
            return torch.zeros(shape)

    with pytest.raises(ModelError, match=rf"q_proj\.{kind}: .* need scales per output"):
        PairsApart(Stored(), 32).take(f"model.layers.0.self_attn.q_proj.{kind}", (torch.float32,), rows, 2)
