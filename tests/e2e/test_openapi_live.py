"""The OpenAPI document against real workers, by schemathesis: its examples, then every field with each kind of wrong
value. No answer is a 500; each has a documented status, media type and shape; what breaks the document is refused.
"""

import json
import re
import subprocess
from collections.abc import Iterator

import pytest

from tests.e2e.conftest import run
from tests.e2e.stack import Stack, make_stack
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.client_environment import client_python

TIMEOUT_S = 300
REQUEST_TIMEOUT_S = "60"
CONTEXT_TOKENS = "128"  # the length of an answer without max_tokens that never ends
ENDS = list(range(0, 512, 4))  # a quarter of all tokens: answers are short
SAME_FIELDS = "^/(v1/completions|v1/responses|v1/messages/count_tokens|generate|rerank)$"
"""Their fields are those of chats, of messages and of /v1/rerank: only their examples are tried."""
UNCHECKED = "positive_data_acceptance"
"""What the document allows may be refused: ranges depend on the model, and are the router's to check."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder, flags = tmp_path_factory.mktemp("stack"), ["--max-model-len", CONTEXT_TOKENS]
    model = make_checkpoint(folder / "tiny-llama", "llama", seed=11)
    config = model / "generation_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token_id": ENDS}))
    batches = ("--batch-dir", str(folder / "batches"))
    yield from run(make_stack(folder, model, with_redis=False, worker_flags=flags, router_flags=batches))


def test_examples_of_every_route(stack: Stack) -> None:
    assert tried(stack, "--phases", "examples") >= 11


def test_every_field_with_each_kind_of_wrong_value(stack: Stack) -> None:
    fields = ("--phases", "coverage", "--exclude-path-regex", SAME_FIELDS)
    assert tried(stack, *fields) > 500


def tried(stack: Stack, *options: str) -> int:
    """Run schemathesis and return how many requests it sent; fails if it found a problem."""
    program = client_python().with_name("schemathesis")
    command = [str(program), "run", f"{stack.url}/openapi.json", "--no-color", "--workers", "2", *options]
    command += ["--generation-deterministic", "--checks", "all", "--exclude-checks", UNCHECKED, "--continue-on-failure"]
    command += ["--request-timeout", REQUEST_TIMEOUT_S, "--max-response-time", REQUEST_TIMEOUT_S]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=stack.folder)
    assert done.returncode == 0, done.stdout + done.stderr
    generated = re.search(r"(\d+) generated, \1 passed", done.stdout)
    assert generated is not None, done.stdout
    return int(generated[1])
