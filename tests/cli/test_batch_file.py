"""`baton batch`: every request answered once, whatever interrupts it."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli.batch import BatchOptions, run_batch
from cli.batch_lines import read_line, sampling_of
from cli.errors import CommandFailed
from tests.fixtures.adapters import ALL_PROJECTIONS, make_adapter
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import random_prompt

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60.0
REQUESTS = 24


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "llama", seed=11)


def write_requests(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def options(source: Path, target: Path, model: Path) -> BatchOptions:
    return BatchOptions(source, target, str(model), "cpu", "float32", 512, 4 << 20)


def answers(path: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines), "done twice"
    return {line["custom_id"]: line for line in lines}


def many() -> list[dict[str, Any]]:
    return [
        {"custom_id": f"r{number}", "prompt": f"word {number}", "max_tokens": 20 + 8 * number, "ignore_eos": True}
        for number in range(REQUESTS)
    ]


def test_killed_in_the_middle_nothing_is_lost_or_done_twice(tiny: Path, tmp_path: Path) -> None:
    source, target = write_requests(tmp_path / "in.jsonl", many()), tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "cli", "batch", str(source), str(target), "--model", str(tiny)]
    command += ["--device", "cpu", "--dtype", "float32", "--max-model-len", "512", "--kv-memory", "1MiB"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + WAIT_S
    while not target.exists() or target.read_bytes().count(b"\n") < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=WAIT_S)
    kept = target.read_bytes()
    assert 3 <= kept.count(b"\n") < REQUESTS
    target.write_bytes(kept + b'{"custom_id": "r')  # a line that the kill cut off

    assert run_batch(options(source, target, tiny)) == 0
    assert target.read_bytes().startswith(kept)
    assert answers(target).keys() == {f"r{number}" for number in range(REQUESTS)}

    whole = tmp_path / "whole.jsonl"
    assert run_batch(options(source, whole, tiny)) == 0
    texts = [
        {name: line["response"]["body"]["choices"] for name, line in answers(each).items()} for each in (target, whole)
    ]
    assert texts[0] == texts[1], "an interruption changed an answer"


def test_a_second_run_does_nothing(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = write_requests(tmp_path / "in.jsonl", many()[:2]), tmp_path / "out.jsonl"
    assert run_batch(options(source, target, tiny)) == 0
    before = target.read_bytes()
    assert run_batch(options(source, target, Path("/no/such/model"))) == 0
    assert target.read_bytes() == before
    assert "2 requests, 2 done already" in capsys.readouterr().err


def test_a_line_chooses_an_adapter_by_its_model(tiny: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "sql", tiny, 1, rank=8, targets=ALL_PROJECTIONS)
    prompt = random_prompt(20)
    lines = [
        {"custom_id": name, "prompt_token_ids": prompt, "model": name, "max_tokens": 12, "temperature": 0}
        for name in ("sql", "gpt-anything")
    ]
    asked = options(write_requests(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl", tiny)
    assert run_batch(replace(asked, adapters=(f"sql={adapter}",))) == 0
    bodies = {name: line["response"]["body"] for name, line in answers(asked.target).items()}
    assert {name: body["model"] for name, body in bodies.items()} == {"sql": "sql", "gpt-anything": "tiny"}
    assert bodies["sql"]["choices"] != bodies["gpt-anything"]["choices"]


def test_openai_lines_are_answered_in_openai_form(tiny: Path, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    line = {
        "custom_id": "mine",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "any", "messages": messages, "max_completion_tokens": 5, "n": 2, "ignore_eos": True},
    }
    target = tmp_path / "out.jsonl"
    assert run_batch(options(write_requests(tmp_path / "in.jsonl", [line]), target, tiny)) == 0
    body = answers(target)["mine"]["response"]["body"]
    assert body["object"] == "chat.completion"
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert all(choice["message"]["role"] == "assistant" for choice in body["choices"])
    assert body["usage"]["completion_tokens"] == 10


def test_bad_requests_are_refused_one_by_one(tiny: Path, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"custom_id": "good", "prompt": [5, 6], "max_tokens": 2},
        {"custom_id": "type", "prompt": "x", "temperature": "hot"},
        {"custom_id": "empty"},
        {"custom_id": "long", "prompt": [5] * 600},
        {"custom_id": "range", "prompt": "x", "top_p": 7},
    ]
    target = tmp_path / "out.jsonl"
    assert run_batch(options(write_requests(tmp_path / "in.jsonl", lines), target, tiny)) == 1
    found = answers(target)
    assert found["good"]["error"] is None
    messages = {name: line["error"]["message"] for name, line in found.items() if line["error"]}
    assert messages.keys() == {"type", "empty", "long", "range"}
    assert "temperature" in messages["type"] and "max_model_len" in messages["long"] and "top_p" in messages["range"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"prompt": "a"}\nnonsense\n', "line 2 is not JSON"),
        ('{"custom_id": "a", "prompt": "x"}\n{"custom_id": "a", "prompt": "y"}\n', "'a' comes twice"),
        ("[1]\n", "line 1 is not a JSON object"),
    ],
)
def test_a_file_that_is_no_batch_is_refused_whole(tiny: Path, tmp_path: Path, lines: str, message: str) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(lines)
    with pytest.raises(CommandFailed, match=message):
        run_batch(options(source, target, tiny))
    assert not target.exists()


@pytest.mark.parametrize("content", ["not ours\n", '{"custom_id": "of another file"}\n'])
def test_an_output_of_something_else_is_left_alone(tiny: Path, tmp_path: Path, content: str) -> None:
    source, target = write_requests(tmp_path / "in.jsonl", many()[:1]), tmp_path / "out.jsonl"
    target.write_text(content)
    with pytest.raises(CommandFailed, match=r"out\.jsonl"):
        run_batch(options(source, target, tiny))
    assert target.read_text() == content


def test_a_request_without_a_seed_has_one_of_its_own() -> None:
    first, second = (sampling_of(read_line('{"prompt": "x"}', number)) for number in (1, 2))
    assert first.seed != second.seed
    assert first == sampling_of(read_line('{"prompt": "x"}', 1))
