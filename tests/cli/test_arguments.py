"""What the commands make of their flags. Nothing is started or called."""

import inspect
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import baton.cli.ask
import baton.cli.status
import baton.cli.top.watch
import baton.cli.up
import baton.cli.why.show
import baton.lab.checks
from baton.cli.__main__ import app
from baton.launch.devices import DeviceChoice
from baton.versions import OLDEST_PROTOCOL, PROTOCOL, RELEASE


class CallLog:
    """Stands for a command's function: remembers its arguments and ends with exit code 0."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> int:
        self.calls.append(arguments)
        return 0


def run(*arguments: str, stdin: str = "") -> Result:
    return CliRunner().invoke(app, arguments, input=stdin)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> CallLog:
    recorder = CallLog()
    for name in ("generate", "chat_once"):
        monkeypatch.setattr(baton.cli.ask, name, recorder)
    monkeypatch.setattr(baton.cli.ask, "chat_loop", recorder)
    return recorder


def test_generate_without_flags_passes_no_options(asked: CallLog) -> None:
    assert run("generate", "Once").exit_code == 0
    assert asked.calls == [("127.0.0.1:50051", "Once", None, {}, False, False)]


def test_generate_passes_on_every_sampling_flag(asked: CallLog) -> None:
    options: dict[str, Any] = {
        "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "typical_p": 0.8, "seed": 7,
        "n": 2, "model": "tiny", "repetition_penalty": 1.2, "presence_penalty": -1.0, "frequency_penalty": 0.5,
        "min_tokens": 3, "logprobs": 0, "prompt_logprobs": 1, "best_of": 4, "beam_width": 3, "length_penalty": 2.0,
    }  # fmt: skip
    flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    flags += [
        "--stop",
        "a",
        "--stop",
        "b",
        "--stop-token-ids",
        "2,3",
        "--ignore-eos",
        "--echo",
        "--timeout",
        "9",
        "--json",
        "--target",
        "host:1",
        "-v",
    ]
    options |= {"stop": ["a", "b"], "stop_token_ids": (2, 3), "ignore_eos": True, "echo": True, "timeout_s": 9.0}
    assert run("generate", "Once", *flags).exit_code == 0
    assert asked.calls == [("host:1", "Once", None, options, True, True)]


@pytest.mark.parametrize(
    ("flags", "option"),
    [
        ("--regex a+", {"regex": "a+"}),
        ("--json-object", {"json_object": True}),
        ("--choice yes --choice no", {"choice": ["yes", "no"]}),
    ],
)
def test_generate_structured_output_flag_is_passed_on(asked: CallLog, flags: str, option: dict[str, object]) -> None:
    assert run("generate", "Once", *flags.split()).exit_code == 0
    assert asked.calls[0][3] == option


@pytest.mark.parametrize(("flag", "option"), [("--json-schema", "json_schema"), ("--grammar", "grammar")])
def test_generate_schema_and_grammar_are_read_from_files(
    asked: CallLog, tmp_path: Path, flag: str, option: str
) -> None:
    path = tmp_path / "form"
    path.write_text('{"type": "null"}')
    assert run("generate", "Once", flag, str(path)).exit_code == 0
    assert asked.calls[0][3] == {option: '{"type": "null"}'}


def test_generate_temperature_zero_is_passed_on(asked: CallLog) -> None:
    run("generate", "Once", "--temperature", "0")
    assert asked.calls[0][3] == {"temperature": 0.0}


def test_generate_token_ids_replace_the_text(asked: CallLog) -> None:
    assert run("generate", "--token-ids", "5,17").exit_code == 0
    assert asked.calls[0][1] == (5, 17)


def test_generate_dash_reads_standard_input(asked: CallLog) -> None:
    assert run("generate", "-", stdin="two\nlines").exit_code == 0
    assert asked.calls[0][1] == "two\nlines"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["generate"], "text or --token-ids"),
        (["generate", "Once", "--token-ids", "1"], "text or --token-ids"),
        (["generate", "--token-ids", "1,x"], "not a list of token ids"),
        (["generate", "--token-ids", "1", "--system", "x"], "system message needs a prompt"),
        (["generate", "Once", "--logprobs", "3"], "needs --json"),
        (["chat", "Hello", "--logprobs", "3"], "needs --json"),
        (["generate", "Once", "--prompt-logprobs", "3"], "needs --json"),
        (["generate", "Once", "--system", "x", "--echo"], "no text to echo"),
        (["chat", "--json"], "need a message"),
        (["up", "--kv-memory", "3 bags"], "not an amount of memory"),
        (["up", "--prefill", "-1"], "--prefill"),
        (["up", "--prefill", "2", "--colocated"], "--colocated allows no prefill workers"),
        (["up", "--draft-model", "small"], "must be given together with --speculate draft"),
        (["up", "--speculate", "draft"], "must be given together with --speculate draft"),
        (["up", "--dtype", "int3"], "--dtype"),
        (["status", "--target", "somewhere"], "not host:port"),
    ],
)
def test_command_with_contradicting_flags_names_them(asked: CallLog, arguments: Sequence[str], complaint: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    # Boxes and line breaks of the message depend on the terminal.
    assert complaint in re.sub(r"[\s│]+", " ", result.output)
    assert asked.calls == []


def test_chat_without_a_message_is_a_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    once, loop = CallLog(), CallLog()
    monkeypatch.setattr(baton.cli.ask, "chat_once", once)
    monkeypatch.setattr(baton.cli.ask, "chat_loop", loop)
    run("chat", "--system", "Be brief")
    run("chat", "Hello")
    assert loop.calls == [("127.0.0.1:50051", "Be brief", {}, False)]
    assert once.calls == [("127.0.0.1:50051", "Hello", None, {}, False, False)]


@pytest.mark.parametrize(
    ("arguments", "admin"),
    [
        ([], "127.0.0.1:50052"),
        (["--target", "host:7000"], "host:7001"),
        (["--target", "[::1]:7000"], "[::1]:7001"),
        (["--target", "a:7000, b:8000"], "a:7001,b:8001"),
        (["--target", "host:7000", "--admin", "other:1"], "other:1"),
    ],
)
def test_status_finds_the_admin_port_after_the_public_one(
    monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str], admin: str
) -> None:
    recorder = CallLog()
    monkeypatch.setattr(baton.cli.status, "show_status", recorder)
    assert run("status", *arguments).exit_code == 0
    assert recorder.calls == [(admin, False)]


def test_status_watch_flag_watches_the_admin_port(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = CallLog()
    monkeypatch.setattr(baton.cli.status, "watch_status", recorder)
    assert run("status", "--watch", "--json").exit_code == 0
    assert recorder.calls == [("127.0.0.1:50052", True)]


COMMANDS_WITH_TARGET = {
    "generate": (("Once",), baton.cli.ask, "generate", "host:7000"),
    "chat": (("Hello",), baton.cli.ask, "chat_once", "host:7000"),
    "status": ((), baton.cli.status, "show_status", "host:7001"),
    "top": ((), baton.cli.top.watch, "show_top", "host:7001"),
    "explain": (("r-1",), baton.cli.why.show, "show_why", "host:7001"),
    "trace": ((), baton.cli.why.show, "show_recent", "host:7001"),
    "why": (("r-1",), baton.cli.why.show, "show_why", "host:7001"),
}
"""Arguments, the function that does the work, and what it must get somewhere."""


@pytest.mark.parametrize("command", COMMANDS_WITH_TARGET)
def test_target_variable_is_default_of_the_flag(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, module, function, expected = COMMANDS_WITH_TARGET[command]
    recorder = CallLog()
    monkeypatch.setattr(module, function, recorder)
    monkeypatch.setenv("BATON_TARGET", "host:7000")
    assert run(command, *arguments).exit_code == 0
    assert run(command, *arguments, "--target", "other:1").exit_code == 0
    by_variable, by_flag = (str(call) for call in recorder.calls)
    assert expected in by_variable and "host" not in by_flag and "other" in by_flag
    monkeypatch.setenv("BATON_TARGET", "")
    run(command, *arguments)
    assert "127.0.0.1" in str(recorder.calls[-1])


def test_command_with_target_reads_the_variable() -> None:
    for command in app.registered_commands:
        assert command.callback is not None
        flag = inspect.signature(command.callback, eval_str=True).parameters.get("target")
        if flag is not None and flag.default is not inspect.Parameter.empty:
            assert "BATON_TARGET" in re.sub(r"\s", "", run(command.callback.__name__, "--help").output)


def test_version_names_release_and_protocol_as_text_and_as_json() -> None:
    said, found = run("version"), json.loads(run("version", "--json").output)
    assert said.output.splitlines()[0] == f"Baton {RELEASE}, protocol {PROTOCOL} (oldest {OLDEST_PROTOCOL})"
    assert (found["release"], found["protocol"], found["oldest_protocol"]) == (RELEASE, PROTOCOL, OLDEST_PROTOCOL)
    assert found["packages"]["grpcio"] in said.output


def test_up_without_flags_leaves_worker_counts_to_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = CallLog()
    monkeypatch.setattr(baton.cli.up, "run_up", recorder)
    assert run("up").exit_code == 0
    ((options,),) = recorder.calls
    assert (options.prefill_workers, options.decode, options.port, options.host) == (None, None, 50051, "127.0.0.1")
    assert (options.device, options.kv_memory, options.model) == (DeviceChoice.AUTO, None, None)


@pytest.mark.parametrize("flags", [["--colocated"], ["--prefill", "0"], ["--colocated", "--prefill", "0"]])
def test_up_colocated_has_no_prefill_workers(monkeypatch: pytest.MonkeyPatch, flags: list[str]) -> None:
    recorder = CallLog()
    monkeypatch.setattr(baton.cli.up, "run_up", recorder)
    assert run("up", *flags).exit_code == 0
    assert recorder.calls[0][0].prefill_workers == 0


def test_test_passes_its_arguments_to_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = CallLog()
    monkeypatch.setattr(baton.lab.checks, "run_checks", recorder)
    run("test", "-q", "-k", "backoff", "tests/cli")
    assert recorder.calls == [(["-q", "-k", "backoff", "tests/cli"], False)]
    run("test", "--no-skips", "tests/cli")
    assert recorder.calls[1:] == [(["tests/cli"], True)]


def test_help_imports_no_heavy_package() -> None:
    import subprocess

    code = "import sys, cli.__main__; print(sorted({'torch', 'transformers', 'grpc', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
