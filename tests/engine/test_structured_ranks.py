"""Answers held to a form, by an engine of two tensor-parallel ranks: only one of them knows of forms."""

import json
from pathlib import Path

import jsonschema
import pytest

from baton.engine import LLM, SamplingParams, StructuredOutputsParams
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.random_schemas import random_schema

pytestmark = pytest.mark.usefixtures("forked_ranks")
PROMPTS = [f"{word} nomi" for word in ("Badega", "Ku", "Fe")]


def test_two_ranks_hold_answers_to_a_form_as_one_does(tmp_path: Path) -> None:
    folder, schema = make_checkpoint(tmp_path, "qwen3"), random_schema(23)
    form = StructuredOutputsParams(json=schema)
    params = [
        SamplingParams(max_tokens=200, temperature=heat, seed=4, n=1 + bool(heat), structured_outputs=form)
        for heat in (0.0, 1.0, 1.0)
    ]
    made = []
    for ranks in (1, 2):
        llm = LLM(str(folder), dtype="float32", tensor_parallel_size=ranks, kv_cache_memory_bytes=8 << 20, quiet=True)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        llm.shutdown()
        made.append([list(each.token_ids) for output in outputs for each in output.outputs])
        for each in (each for output in outputs for each in output.outputs):
            assert each.finish_reason == "stop", each.text
            jsonschema.validate(json.loads(each.text), schema)
    assert made[0] == made[1]
    assert len(made[0]) == 5
