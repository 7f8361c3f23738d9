"""Batches of OpenAI's client against real processes, one of which is killed."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.e2e.conftest import run
from tests.e2e.stack import READY_S, Stack, make_stack
from tests.fixtures.client_environment import problems

LINES = 120
URL = "/v1/completions"


@pytest.fixture
def stack(tmp_path: Path, tiny_llama: Path) -> Iterator[Stack]:
    flags = ("--batch-dir", str(tmp_path / "batches"))
    yield from run(make_stack(tmp_path, tiny_llama, with_redis=False, router_flags=flags))


def test_openai_client_runs_and_cancels_batches(stack: Stack) -> None:
    assert problems("openai_client", f"{stack.url}/v1", ("batches", "batch_cancelled")) == []


def test_batch_of_a_killed_router_continues_without_repeating_answers(stack: Stack, tmp_path: Path) -> None:
    body = {"prompt": "one two", "max_tokens": 40, "ignore_eos": True, "temperature": 1.0}
    lines: list[Any] = [{"custom_id": f"line-{number}", "body": body} for number in range(LINES)]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    with httpx2.Client(base_url=stack.url, timeout=60.0, trust_env=False) as client:
        form: dict[str, Any] = {"files": {"file": ("in.jsonl", content)}, "data": {"purpose": "batch"}}
        file = client.post("/v1/files", **form).json()
        asked = {"input_file_id": file["id"], "endpoint": URL, "completion_window": "24h"}
        batch_id = client.post("/v1/batches", json=asked).json()["id"]
        [output] = [folder / "output" for folder in tmp_path.glob(f"batches/*/running/{batch_id}")]
        stack.wait_for(lambda: output.exists() and output.read_bytes().count(b"\n") > LINES // 4, READY_S, "answers")
        stack.processes["router"].kill()
        before = output.read_bytes()
        before = before[: before.rfind(b"\n") + 1]
        assert before.count(b"\n") < LINES
        stack.processes["router"].start()
        stack.wait_ready()
        batch = finished(client, batch_id)
        answered = client.get(f"/v1/files/{batch['output_file_id']}/content").content
    assert batch["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
    assert answered.startswith(before)
    names = [json.loads(line)["custom_id"] for line in answered.splitlines()]
    assert sorted(names) == sorted(line["custom_id"] for line in lines)


def finished(client: httpx2.Client, batch_id: str) -> Any:
    deadline_s = time.monotonic() + READY_S
    while (batch := client.get(f"/v1/batches/{batch_id}").json())["status"] != "completed":
        assert time.monotonic() < deadline_s, batch
        time.sleep(0.05)
    return batch
