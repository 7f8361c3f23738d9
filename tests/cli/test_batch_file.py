"""`baton batch`: every request answered once, whatever interrupts it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from baton.cli.batch import run_batch
from baton.cli.batch_requests import BatchChat, BatchCompletion, BatchFields, Ready, seed_of
from baton.cli.offline_options import BatchOptions
from baton.launch import CommandFailed
from baton.router.http.batches.lines import CHAT, BatchRequest, read_lines
from baton.text.output.thoughts import OutputParser, ThoughtParser
from tests.fixtures.adapters import ALL_PROJECTIONS, make_adapter
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import random_prompt

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60.0
REQUESTS = 24
WRITTEN = 3
HELD = f"""
import sys
from baton.cli import batch
from baton.cli.__main__ import main

write, written = batch.write, iter(range({WRITTEN}))

def held(target, line):
    if next(written, None) is None:
        sys.stdin.read()  # until the process that started it is gone
    write(target, line)

batch.write = held
main()
"""
"""The command; behind so many answers it stands still."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "llama", seed=11)


def write_requests(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def options(source: Path, target: Path, model: Path) -> BatchOptions:
    return BatchOptions(
        source=source,
        target=target,
        model=str(model),
        device="cpu",
        dtype="float32",
        max_model_len=512,
        kv_memory=4 << 20,
    )


def answers(path: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines), "done twice"
    return {line["custom_id"]: line for line in lines}


def many() -> list[dict[str, Any]]:
    return [
        {"custom_id": f"r{number}", "prompt": f"word {number}", "max_tokens": 20 + 8 * number, "ignore_eos": True}
        for number in range(REQUESTS)
    ]


def test_batch_killed_midway_resumes_without_loss_or_repetition(tiny: Path, tmp_path: Path) -> None:
    source, target = write_requests(tmp_path / "in.jsonl", many()), tmp_path / "out.jsonl"
    command = [sys.executable, "-c", HELD, "batch", str(source), str(target), "--model", str(tiny)]
    command += ["--device", "cpu", "--dtype", "float32", "--max-model-len", "512", "--kv-memory", "1MiB"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
    deadline = time.monotonic() + WAIT_S
    while not target.exists() or target.read_bytes().count(b"\n") < WRITTEN:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=WAIT_S)
    kept = target.read_bytes()
    assert kept.count(b"\n") == WRITTEN < REQUESTS
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


def test_batch_repeated_run_answers_nothing_again(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = write_requests(tmp_path / "in.jsonl", many()[:2]), tmp_path / "out.jsonl"
    assert run_batch(options(source, target, tiny)) == 0
    before = target.read_bytes()
    assert run_batch(options(source, target, Path("/no/such/model"))) == 0
    assert target.read_bytes() == before
    assert "2 requests, 2 answered before" in capsys.readouterr().err


def test_batch_line_selects_adapter_by_model(tiny: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "sql", tiny, 1, rank=8, targets=ALL_PROJECTIONS)
    prompt = random_prompt(20)
    lines = [
        {"custom_id": name, "prompt_token_ids": prompt, "model": name, "max_tokens": 12, "temperature": 0}
        for name in ("sql", "tiny", str(tiny), "gpt-anything")
    ]
    asked = options(write_requests(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl", tiny)
    assert run_batch(replace(asked, adapter=[f"sql={adapter}"])) == 1
    found = answers(asked.target)
    error = found.pop("gpt-anything")["error"]
    assert error["param"] == "model" and error["message"].startswith("model: 'gpt-anything' is not loaded, only tiny, ")
    bodies = {name: line["response"]["body"] for name, line in found.items()}
    assert {name: body["model"] for name, body in bodies.items()} == {name: name for name in ("sql", "tiny", str(tiny))}
    assert bodies["sql"]["choices"] != bodies["tiny"]["choices"] == bodies[str(tiny)]["choices"]


def test_batch_openai_line_is_answered_in_openai_form(tiny: Path, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    line = {
        "custom_id": "mine",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "tiny", "messages": messages, "max_completion_tokens": 5, "n": 2, "ignore_eos": True},
    }
    target = tmp_path / "out.jsonl"
    assert run_batch(options(write_requests(tmp_path / "in.jsonl", [line]), target, tiny)) == 0
    body = answers(target)["mine"]["response"]["body"]
    assert body["object"] == "chat.completion"
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert all(choice["message"]["role"] == "assistant" for choice in body["choices"])
    assert body["usage"]["completion_tokens"] == 10


BAD: list[tuple[dict[str, Any], str | None]] = [
    ({"prompt": "x", "temperature": "hot"}, "temperature"),
    ({}, "prompt"),
    ({"prompt": [5] * 600}, "prompt"),
    ({"prompt": [5, 10**6]}, "prompt[1]"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": [5], "prompt_token_ids": [5]}, "prompt_token_ids"),
    ({"prompt": "x", "top_p": 7}, "top_p"),
    ({"prompt": "x", "temprature": 0}, "temprature"),
    ({"prompt": "x", "speculative": {"num_speculative_tokens": 65}}, "speculative.num_speculative_tokens"),
    ({"prompt": "x", "max_tokens": 10**6}, "max_tokens"),
    ({"prompt": "x", "guided_regex": "("}, None),
    ({"prompt": "x", "guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"prompt": "x", "logprobs": 1}, "logprobs"),
    ({"prompt": "x", "stream": True}, "stream"),
    ({"prompt": "x", "model": "nope"}, "model"),
    ({"messages": [{"role": "user", "content": "x", "nmae": "y"}]}, "messages[0].nmae"),
    ({"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}, "tools[0].function"),
    ({"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs.a"),
    ({"messages": []}, "messages"),
    ({"url": "/v1/audio/speech", "body": {"input": "x"}}, "url"),
    ({"url": "/v1/chat/completions", "body": {"prompt": "x"}}, "prompt"),
    ({"method": "GET", "body": {"prompt": "x"}}, "method"),
    ({"bdy": {"prompt": "x"}}, "bdy"),
    ({"body": {"prompt": "x"}, "bodyy": 1}, "bodyy"),
    ({"body": "x"}, "body"),
]


def test_batch_invalid_request_is_refused_alone(tiny: Path, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [{"custom_id": "good", "prompt": [5, 6], "max_tokens": 2}]
    lines += [{"custom_id": str(number), **line} for number, (line, _) in enumerate(BAD)]
    target = tmp_path / "out.jsonl"
    assert run_batch(options(write_requests(tmp_path / "in.jsonl", lines), target, tiny)) == 1
    found = answers(target)
    assert found.pop("good")["error"] is None
    assert {name: line["error"]["param"] for name, line in found.items()} == {
        str(number): param for number, (_, param) in enumerate(BAD)
    }
    assert all(param is None or param in found[str(n)]["error"]["message"] for n, (_, param) in enumerate(BAD))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"nonsense", "line 2 is not JSON"),
        (b"[1]", "line 2 is not a JSON object"),
        (b'{"custom_id": "a", "prompt": "y"}', "'a' is used twice"),
        (b'{"custom_id": 5, "prompt": "y"}', "custom_id: must be a string"),
        (b'{"prompt": "\xff"}', "line 2 is not JSON"),
        (b"[" * 100_000, "line 2 is not JSON"),
    ],
)
def test_batch_malformed_line_keeps_other_lines(line: bytes, message: str) -> None:
    first, bad, third, last = read_lines(
        b'{"custom_id": "a", "prompt": "x"}\n%b\n{"custom_id": "line-2", "prompt": "\xe2\x80\xa8"}\r\n\n{"prompt": "z"}'
        % line
    )
    assert (first.custom_id, third.custom_id, last.custom_id) == ("a", "line-2", "line-5")
    assert (third.body["prompt"], last.body["prompt"]) == ("\u2028", "z"), "no line ends within a text"
    assert bad.custom_id == "line-2'" and message in str(bad.fault)


FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "choice": ({"guided_choice": ["yes", "no"]}, "yes|no"),
    "regex": ({"guided_regex": "[0-9]{4}"}, "[0-9]{4}"),
    "grammar": ({"guided_grammar": 'start: "ab" "ab"? "."'}, r"(ab){1,2}\."),
    "json": ({"guided_json": {"const": "x"}}, '"x"'),
    "object": ({"response_format": {"type": "json_object"}}, r"\{.*"),
    "outputs": ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
}


def test_batch_speculative_method_changes_no_token(tiny: Path, tmp_path: Path) -> None:
    lines = [
        {"custom_id": name, "prompt": "a", "max_tokens": 4, "temperature": 0, "speculative": {"method": name}}
        for name in ("off", "ngram")
    ]
    target = tmp_path / "out.jsonl"
    assert run_batch(options(write_requests(tmp_path / "in.jsonl", lines), target, tiny)) == 0
    texts = {line["response"]["body"]["choices"][0]["text"] for line in answers(target).values()}
    assert len(texts) == 1


def test_batch_session_is_validated_and_changes_no_answer(tiny: Path, tmp_path: Path) -> None:
    sessions: dict[str, dict[str, Any]] = {
        "none": {},
        "one": {"session_id": "agent-7", "keep_for_s": 60, "done": True},
        "openai": {"prompt_cache_key": "agent-7", "prompt_cache_retention": "24h"},
        "bad": {"session_id": "agent-7", "keep_for_s": -1},
    }
    asked = {"prompt": "a", "max_tokens": 4, "temperature": 0}
    lines = [{"custom_id": name, **asked, **session} for name, session in sessions.items()]
    target = tmp_path / "out.jsonl"
    run_batch(options(write_requests(tmp_path / "in.jsonl", lines), target, tiny))
    given = answers(target)
    texts = {given[name]["response"]["body"]["choices"][0]["text"] for name in ("none", "one", "openai")}
    assert len(texts) == 1
    assert "keep_for_s" in str(given["bad"])


def test_batch_structured_output_is_enforced(tiny: Path, tmp_path: Path) -> None:
    lines = [{"custom_id": name, "prompt": "a", "max_tokens": 40, **asked} for name, (asked, _) in FORMS.items()]
    target = tmp_path / "out.jsonl"
    assert run_batch(options(write_requests(tmp_path / "in.jsonl", lines), target, tiny)) == 0
    for name, line in answers(target).items():
        text = line["response"]["body"]["choices"][0]["text"]
        assert re.fullmatch(FORMS[name][1], text, re.DOTALL), (name, text)


@pytest.mark.parametrize("message", [BatchChat, BatchCompletion])
def test_batch_messages_extend_those_of_the_server(message: type[BaseModel]) -> None:
    of_both, served = message.__bases__
    assert of_both is BatchFields
    assert served.__module__.startswith("baton.router.http.messages") and message.model_config["extra"] == "forbid"
    assert message.model_fields.keys() == served.model_fields.keys()  # type: ignore[attr-defined]


@pytest.mark.parametrize("content", ["not ours\n", '{"custom_id": "of another file"}\n'])
def test_batch_foreign_output_file_is_not_changed(tiny: Path, tmp_path: Path, content: str) -> None:
    source, target = write_requests(tmp_path / "in.jsonl", many()[:1]), tmp_path / "out.jsonl"
    target.write_text(content)
    with pytest.raises(CommandFailed, match=r"out\.jsonl"):
        run_batch(options(source, target, tiny))
    assert target.read_text() == content


def test_batch_request_without_seed_gets_a_stable_one() -> None:
    assert seed_of("line-1") == 3274914901562840328, "the same in every run"
    assert seed_of("line-1") != seed_of("line-2")


def test_batch_chat_answer_separates_reasoning() -> None:
    request = BatchRequest("one", CHAT, {})
    nothing: Any = None
    ready = Ready(request, nothing, nothing, "m", None, lambda: OutputParser(ThoughtParser(opened=True), None))
    answer = ready.answer("Hm.</think>Two.", "stop")
    assert answer["message"] == {
        "role": "assistant", "content": "Two.", "refusal": None, "reasoning_content": "Hm.",
    }  # fmt: skip


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"unit": {"enum": ["c", "f"]}},
                "required": ["unit"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "oven")
]
SHOWN = (
    "{{ messages[0].content }}{% for tool in tools or [] %}<tool_call>{{ tool.function.name }}</tool_call>{% endfor %}"
)


def test_batch_line_with_tools_is_answered_with_calls(tiny: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny, tmp_path / "calls")
    (model / "chat_template.jinja").write_text(SHOWN)
    asked = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": TOOLS,
        "parallel_tool_calls": False,
        "max_tokens": 90,
    }
    choices = {"named": {"type": "function", "function": {"name": "oven"}}, "required": "required", "none": "none"}
    lines = [{"custom_id": name, **asked, "tool_choice": choice} for name, choice in choices.items()]
    lines += [{"custom_id": "missing", **asked, "tool_choice": {"type": "function", "function": {"name": "no"}}}]
    target = tmp_path / "out.jsonl"

    assert run_batch(options(write_requests(tmp_path / "in.jsonl", lines), target, model)) == 1

    found = answers(target)
    assert found.pop("missing")["error"]["param"] == "tool_choice.function.name"
    given = {name: line["response"]["body"]["choices"][0] for name, line in found.items()}
    assert "tool_calls" not in given["none"]["message"]
    for name, functions in (("named", {"oven"}), ("required", {"weather", "oven"})):
        assert given[name]["finish_reason"] == "tool_calls"
        calls = [call["function"] for call in given[name]["message"]["tool_calls"]]
        assert calls and {call["name"] for call in calls} <= functions
        assert all(json.loads(call["arguments"])["unit"] in ("c", "f") for call in calls)


def test_batch_reasoning_keeps_budget_and_structured_output(tiny: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny, tmp_path / "thinks")
    template = "{{ messages[0].content }}<think>{{ '</think>' if enable_thinking is defined and not enable_thinking }}"
    (model / "chat_template.jinja").write_text(template)
    asked = {"messages": [{"role": "user", "content": "hi"}], "guided_choice": ["yes", "no"], "max_tokens": 90}
    lines = [
        {"custom_id": "budget", **asked, "thinking_budget": 6},
        {"custom_id": "none", **asked, "reasoning_effort": "none"},
    ]
    target = tmp_path / "out.jsonl"

    assert run_batch(options(write_requests(tmp_path / "in.jsonl", lines), target, model)) == 0

    said = {name: line["response"]["body"]["choices"][0]["message"] for name, line in answers(target).items()}
    assert said["budget"]["content"] in ("yes", "no") and said["budget"]["reasoning_content"]
    assert said["none"]["content"] in ("yes", "no") and "reasoning_content" not in said["none"]
