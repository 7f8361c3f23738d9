"""What other threads have to do is begun just before a model's layers, by every kind of model."""

from pathlib import Path

import pytest
import torch

from baton.engine.models.batch import make_batch
from baton.engine.models.transformers_model import TransformersModel
from baton.engine.request import Chunk
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import CPU, PagedModel, random_prompt


@pytest.mark.parametrize(("family", "packed"), [("llama", True), ("llama", False), ("gpt2", False)])
@pytest.mark.parametrize("lengths", [(7, 1), (1, 1)], ids=["a prompt and a token", "tokens"])
def test_function_on_layers_start_is_called_once_before_any_layer_has_written(
    tmp_path: Path, family: str, packed: bool, lengths: tuple[int, ...]
) -> None:
    paged = PagedModel(make_checkpoint(tmp_path / "model", family), packed=packed)
    assert isinstance(paged.model, TransformersModel) == (family == "gpt2")
    chunks = [Chunk(number, random_prompt(length), 0, paged.blocks(length)) for number, length in enumerate(lengths)]
    unwritten: list[bool] = []

    def on_layers_start() -> None:
        unwritten.append(all(bool(paged.kv.data[chunk.block_table[0], :, :, :, 0].isnan().all()) for chunk in chunks))

    with torch.inference_mode():
        paged.model.hidden(make_batch(chunks, paged.block_tokens, CPU, on_layers_start), paged.kv)
    assert unwritten == [True]
    assert not any(bool(paged.kv.data[chunk.block_table[0], :, :, :, 0].isnan().any()) for chunk in chunks)
