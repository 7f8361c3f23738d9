"""`baton batch` with lines for /v1/embeddings, beside others: the vectors are the server's and transformers'."""

import base64
import struct
from pathlib import Path
from typing import Any

import pytest

from baton.cli.batch import run_batch
from baton.cli.batch_requests import MAX_INPUTS_TOGETHER, ReadyInputs, _together
from baton.router.http.batches.lines import BatchRequest
from tests.cli.test_batch_file import answers, options, write_requests
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import random_prompt
from tests.fixtures.poolers import expected_vectors, furthest, pooling_config, write_modules

PROMPTS = [random_prompt(tokens, seed=tokens) for tokens in (3, 40, 100)]
URL = "/v1/embeddings"
CLOSE = 1e-5


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "llama", seed=11)
    return write_modules(folder, pooling_config("mean"), normalises=True)


def test_batch_embedding_lines_are_answered_or_refused_by_field(tiny: Path, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"custom_id": "many", "method": "POST", "url": URL, "body": {"input": PROMPTS}},
        {"custom_id": "answer", "prompt": "hi", "max_tokens": 3},
        {"custom_id": "one", "body": {"input": PROMPTS[1], "encoding_format": "base64"}},
        {"custom_id": "cut", "body": {"input": PROMPTS[1], "dimensions": 1}},
        {"custom_id": "empty", "body": {"input": ["a", ""]}},
        {"custom_id": "long", "body": {"input": [[5] * 513]}},
        {"custom_id": "wide", "body": {"input": "a", "dimensions": 65}},
        {"custom_id": "typo", "body": {"input": "a", "dimension": 3}},
    ]
    target = tmp_path / "out.jsonl"
    assert run_batch(options(write_requests(tmp_path / "in.jsonl", lines), target, tiny)) == 1
    done, expected = answers(target), expected_vectors(tiny, PROMPTS, "mean", normalises=True)
    body = done["many"]["response"]["body"]
    assert furthest([each["embedding"] for each in body["data"]], expected) < CLOSE
    assert body["usage"]["total_tokens"] == 143 and body["object"] == "list" and body["model"] == "tiny"
    packed = base64.b64decode(done["one"]["response"]["body"]["data"][0]["embedding"])
    assert furthest([struct.unpack(f"<{len(packed) // 4}f", packed)], [expected[1]]) < CLOSE
    assert abs(done["cut"]["response"]["body"]["data"][0]["embedding"][0]) == pytest.approx(1.0)
    assert done["answer"]["response"]["body"]["object"] == "text_completion"
    refused = {name: line["error"]["message"] for name, line in done.items() if line["error"] is not None}
    assert refused == {
        "empty": "input[1]: the prompt is empty",
        "long": "input[0]: 513 tokens; at most 512",
        "wide": "dimensions: must be from 1 to 64, not 65",
        "typo": "dimension: unknown field; did you mean dimensions?",
    }


def test_batch_equal_embedding_options_are_computed_together() -> None:
    def line(inputs: int, dimensions: int | None = None) -> ReadyInputs:
        prompts: Any = (None,) * inputs
        return ReadyInputs(BatchRequest(""), prompts, dimensions, False, "tiny", None)

    lines = [line(1), line(2), line(1, dimensions=3), line(1, dimensions=3), line(MAX_INPUTS_TOGETHER), line(1)]
    assert [len(group) for group in _together(lines)] == [2, 2, 1, 1]
