"""`baton launch`: variables and command lines with which agents use a service, and nothing written to their files."""

import json
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

import baton.cli.agents
from baton.cli.agents import AGENTS, Service, Start, run_agent
from baton.launch import CommandFailed

SERVICE = Service("http://127.0.0.1:8000", "org/model", 32_768, Path("/launch"), "key-1")


def start(agent: str) -> Start:
    return AGENTS[agent].start(SERVICE)


def test_claude_gets_address_key_and_model_by_variables() -> None:
    made = start("claude")

    assert made.command == ("claude",)
    assert made.variables["ANTHROPIC_BASE_URL"] == SERVICE.url
    assert made.variables["ANTHROPIC_AUTH_TOKEN"] == "key-1" and made.variables["ANTHROPIC_API_KEY"] == ""
    assert {value for name, value in made.variables.items() if name.endswith("_MODEL")} == {"org/model"}
    assert made.variables["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"


def test_codex_gets_a_provider_by_flags() -> None:
    made = start("codex")
    values = made.command[2::2]

    assert made.command[1::2] == ("-c",) * len(values)
    settings = tomllib.loads("\n".join(values))
    provider = settings["model_providers"][settings["model_provider"]]
    assert (settings["model"], settings["model_context_window"]) == ("org/model", 32_768)
    assert (provider["base_url"], provider["wire_api"]) == (f"{SERVICE.url}/v1", "responses")
    assert made.variables == {provider["env_key"]: "key-1"}


def test_opencode_gets_a_provider_with_limits_by_a_variable() -> None:
    config = json.loads(start("opencode").variables["OPENCODE_CONFIG_CONTENT"])

    name, _, model = config["model"].partition("/")
    provider = config["provider"][name]
    assert provider["options"] == {"baseURL": f"{SERVICE.url}/v1", "apiKey": "key-1"}
    assert provider["models"][model]["limit"] == {"context": 32_768, "output": 8192}


def test_continue_gets_a_model_with_tools_by_a_file() -> None:
    made = start("continue")
    [(path, text)] = made.files.items()
    [model] = json.loads(text)["models"]

    assert made.command == ("cn", "--config", str(path))
    assert (model["provider"], model["apiBase"], model["apiKey"]) == ("openai", f"{SERVICE.url}/v1", "key-1")
    assert model["capabilities"] == ["tool_use"]
    assert model["defaultCompletionOptions"] == {"contextLength": 32_768, "maxTokens": 8192}


def test_aider_gets_address_by_variables_and_limits_by_a_file() -> None:
    made = start("aider")
    [(path, text)] = made.files.items()

    assert made.variables == {"OPENAI_API_BASE": f"{SERVICE.url}/v1", "OPENAI_API_KEY": "key-1"}
    assert made.command == ("aider", "--model", "openai/org/model", "--model-metadata-file", str(path))
    assert json.loads(text)["openai/org/model"]["max_input_tokens"] == 32_768


def test_files_of_an_agent_are_readable_only_by_their_user(tmp_path: Path) -> None:
    replace(start("continue"), files={tmp_path / "a" / "b.yaml": "text"}).write_files()

    assert (tmp_path / "a" / "b.yaml").read_text() == "text"
    assert (tmp_path / "a" / "b.yaml").stat().st_mode & 0o077 == 0


class _Models(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": "tiny", "max_model_len": 4096}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    """Address of a service that lists one model."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Models) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_launch_starts_the_agent_with_its_arguments_and_returns_its_exit_code(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "claude"
    program.write_text('#!/bin/sh\necho "$ANTHROPIC_MODEL at $ANTHROPIC_BASE_URL: $*"\nexit 7\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    assert run_agent("claude", ["-p", "hi"], url, None, only_show=False) == 7
    assert capfd.readouterr().out == f"tiny at {url}: -p hi\n"


def test_launch_show_prints_a_command_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_agent("claude", ["-p", "say hi"], url, None, only_show=True) == 0

    shown = capsys.readouterr().out
    assert f"ANTHROPIC_BASE_URL={url} " in shown and shown.endswith(" claude -p 'say hi'\n")


@pytest.fixture
def unwritable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder for the files of agents that cannot be created, since its parent is a file."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(baton.cli.agents, "RUNTIME", tmp_path / "file" / "runtime")
    return tmp_path / "file" / "runtime"


def test_launch_of_an_agent_without_files_writes_nothing(
    url: str, unwritable: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_agent("claude", [], url, None, only_show=True) == 0
    assert capsys.readouterr().out.endswith(" claude\n")


def test_launch_names_the_folder_that_cannot_be_written(url: str, unwritable: Path) -> None:
    folder = unwritable / "launch" / url.removeprefix("http://").replace(":", "-")
    with pytest.raises(CommandFailed, match=f"^{folder}: cannot be written: "):
        run_agent("continue", [], url, None, only_show=True)


@pytest.mark.parametrize(
    ("agent", "remedy"), [("codex", "npm install -g @openai/codex"), ("aider", "pipx install aider-chat")]
)
def test_launch_of_an_agent_that_is_not_installed_names_its_package(
    agent: str, remedy: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CommandFailed, match=remedy):
        run_agent(agent, [], url, None, only_show=False)


def test_launch_without_a_service_at_the_address_says_so() -> None:
    with pytest.raises(CommandFailed, match="no service answers"):
        run_agent("claude", [], "http://127.0.0.1:9", None, only_show=True)
