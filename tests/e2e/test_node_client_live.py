"""Node client that only uses the proto files, against a real stack."""

import json
import subprocess

from baton.client import BatonClient
from tests.e2e.stack import Stack


def test_node_client_gets_the_same_tokens_as_the_python_library(stack: Stack, node_client: list[str]) -> None:
    command = [
        *node_client,
        "--target",
        stack.target,
        "--max-tokens",
        "12",
        "--temperature",
        "0",
        "--json",
        "def main(",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    deltas = [event for event in events if event["event"] == "delta"]
    with BatonClient(stack.target) as baton:
        expected = baton.complete("def main(", max_tokens=12, temperature=0.0).choices[0]

    assert [event["event"] for event in (events[0], events[-1])] == ["started", "finished"]
    assert [token for delta in deltas for token in delta["token_ids"]] == list(expected.token_ids)
    assert "".join(delta["text"] for delta in deltas) == expected.text
