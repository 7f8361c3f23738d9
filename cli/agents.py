"""Start a coding agent that uses a running service, without a change of the agent's own files (`baton launch`).

Agents are configured by environment variables, flags and files of this module only, so they work as before when they
are started directly.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from baton.cli.connection import API_KEY_VARIABLE
from baton.launch import CommandFailed
from baton.launch.paths import RUNTIME
from baton.launch.run_record import running_services
from baton.process.private_files import private_folder, write_private

ANY_KEY = "baton"
"""Key that agents send to a service without API keys: they refuse to start without one."""
START_S = 600.0
_POLL_S = 0.5
_ANSWER_SHARE = 4  # an answer has at most this part of the context; agents shorten conversations accordingly


@dataclass(frozen=True, slots=True)
class Service:
    """Address and model of a service. `context_tokens`: limit of prompt and answer together.

    `folder`: for the files of agents that take the address from a file only.
    """

    url: str
    model: str
    context_tokens: int
    folder: Path
    key: str = ANY_KEY

    @property
    def answer_tokens(self) -> int:
        """Maximum answer length stated to agents, in tokens."""
        return self.context_tokens // _ANSWER_SHARE


@dataclass(frozen=True, slots=True)
class Start:
    """Command line of an agent, and environment variables and files to set."""

    command: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[Path, str] = field(default_factory=dict)

    def write_files(self) -> None:
        """Write the files, which only their user may read. Raises: OSError."""
        for path, text in self.files.items():
            private_folder(path.parent)
            write_private(path, text)


def _claude(service: Service) -> Start:
    sizes = (f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU"))
    models = ("ANTHROPIC_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL", *sizes)
    variables = {
        "ANTHROPIC_BASE_URL": service.url,
        "ANTHROPIC_AUTH_TOKEN": service.key,
        "ANTHROPIC_API_KEY": "",  # else the user's own key would be sent
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(service.answer_tokens),
        **dict.fromkeys(models, service.model),
    }
    return Start(("claude",), variables)


def _codex(service: Service) -> Start:
    provider = {"name": "Baton", "base_url": f"{service.url}/v1", "wire_api": "responses", "env_key": API_KEY_VARIABLE}
    settings = {
        "model": service.model,
        "model_provider": ANY_KEY,
        "model_context_window": service.context_tokens,
        **{f"model_providers.{ANY_KEY}.{name}": value for name, value in provider.items()},
    }
    # JSON's texts and numbers are also TOML's.
    flags = (part for name, value in settings.items() for part in ("-c", f"{name}={json.dumps(value)}"))
    return Start(("codex", *flags), {API_KEY_VARIABLE: service.key})


def _opencode(service: Service) -> Start:
    limit = {"context": service.context_tokens, "output": service.answer_tokens}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Baton",
        "options": {"baseURL": f"{service.url}/v1", "apiKey": service.key},
        "models": {service.model: {"name": service.model, "limit": limit}},
    }
    model = f"{ANY_KEY}/{service.model}"
    config = {"provider": {ANY_KEY: provider}, "model": model, "small_model": model, "autoupdate": False}
    return Start(("opencode",), {"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def _qwen(service: Service) -> Start:
    variables = {"OPENAI_BASE_URL": f"{service.url}/v1", "OPENAI_API_KEY": service.key, "OPENAI_MODEL": service.model}
    return Start(("qwen",), variables)


def _continue(service: Service) -> Start:
    model = {
        "name": service.model,
        "provider": "openai",
        "model": service.model,
        "apiBase": f"{service.url}/v1",
        "apiKey": service.key,
        "roles": ["chat"],
        "capabilities": ["tool_use"],
        "defaultCompletionOptions": {"contextLength": service.context_tokens, "maxTokens": service.answer_tokens},
    }
    config = {"name": "Baton", "version": "1.0.0", "schema": "v1", "models": [model]}
    path = service.folder / "continue.yaml"
    return Start(("cn", "--config", str(path)), files={path: json.dumps(config)})  # JSON is also YAML


def _aider(service: Service) -> Start:
    name, path = f"openai/{service.model}", service.folder / "aider.json"
    limits = {"max_input_tokens": service.context_tokens, "max_output_tokens": service.answer_tokens}
    metadata = {name: {**limits, "litellm_provider": "openai", "mode": "chat"}}
    variables = {"OPENAI_API_BASE": f"{service.url}/v1", "OPENAI_API_KEY": service.key}
    command = ("aider", "--model", name, "--model-metadata-file", str(path))
    return Start(command, variables, {path: json.dumps(metadata)})


class Agent(NamedTuple):
    """Function that returns how to start an agent for a service, its program, and its package on npm or PyPI."""

    start: Callable[[Service], Start]
    program: str
    package: str
    is_python: bool = False

    @property
    def installation(self) -> str:
        return f"{'pipx install' if self.is_python else 'npm install -g'} {self.package}"


AGENTS: Mapping[str, Agent] = {
    "claude": Agent(_claude, "claude", "@anthropic-ai/claude-code"),
    "codex": Agent(_codex, "codex", "@openai/codex"),
    "opencode": Agent(_opencode, "opencode", "opencode-ai"),
    "qwen": Agent(_qwen, "qwen", "@qwen-code/qwen-code"),
    "continue": Agent(_continue, "cn", "@continuedev/cli"),
    "aider": Agent(_aider, "aider", "aider-chat", is_python=True),
}


def run_agent(agent: str, further: Sequence[str], url: str | None, model: str | None, only_show: bool) -> int:
    """Start an agent for a service, and the service if none runs. Return the agent's exit code. Raises: CommandFailed.

    `url`: address of the service; None: the newest on this machine. `model`: model to serve, if a service is started.
    """
    launched = AGENTS[agent]
    if not only_show and shutil.which(launched.program) is None:
        raise CommandFailed(f"{launched.program} is not on PATH; install it: {launched.installation}")
    with _served(url, model) as served:
        folder = RUNTIME / "launch" / urlsplit(served).netloc.replace(":", "-")
        made = launched.start(service_at(served, os.environ.get(API_KEY_VARIABLE) or ANY_KEY, folder))
        if made.files:
            with _writing(folder):
                private_folder(RUNTIME)
                made.write_files()
        command = [*made.command, *further]
        if only_show:
            assignments = [f"{name}={shlex.quote(value)}" for name, value in made.variables.items()]
            print(" ".join([*assignments, shlex.join(command)]))
            return 0
        return subprocess.run(command, env=os.environ | made.variables).returncode


def service_at(url: str, key: str, folder: Path) -> Service:
    """Ask a service for its model. `folder`: see Service. Raises: CommandFailed."""
    try:
        models = _get(f"{url}/v1/models", key)["data"]
    except (OSError, ValueError) as error:
        raise CommandFailed(f"{url}/v1/models: no service answers: {error}") from error
    return Service(url, models[0]["id"], models[0]["max_model_len"], folder, key)


def _get(url: str, key: str) -> Any:
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=5.0) as answer:
        return json.load(answer)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Raise CommandFailed, which names the folder, for an OSError."""
    try:
        yield
    except OSError as error:
        raise CommandFailed(f"{folder}: cannot be written: {error}") from error


@contextmanager
def _served(url: str | None, model: str | None) -> Iterator[str]:
    """Yield the address of a service: the given one, a running one, or one that runs for the duration of the context.

    Raises: CommandFailed.
    """
    if url is not None:
        yield url.rstrip("/")
        return
    if (running := _running()) is not None and model is None:
        yield running
        return
    with _writing(RUNTIME):
        log = private_folder(RUNTIME) / "launch.log"
        output = log.open("wb")
    print(f"baton: starting a service; its output goes to {log}", file=sys.stderr)
    command = [sys.executable, "-P", "-m", "baton.cli", "up", *(("--model", model) if model else ())]
    with output:
        up = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)
    try:
        yield _ready(up, log)
    finally:
        up.terminate()  # it drains and stops its processes
        up.wait()


def _running(pid: int | None = None) -> str | None:
    """Return the address of the newest service; only of the run with this pid, unless None."""
    runs = (run for run in running_services(RUNTIME) if run.http_targets and pid in (None, run.pid))
    return next((f"http://{run.http_targets[0]}" for run in runs), None)


def _ready(up: "subprocess.Popen[bytes]", log: Path) -> str:
    """Wait until the started service is ready; return its address. Raises: CommandFailed."""
    end_s = time.monotonic() + START_S
    while up.poll() is None and time.monotonic() < end_s:
        url = _running(up.pid)
        try:
            if url is not None and _get(f"{url}/ready", ANY_KEY)["ready"]:
                return url
        except (OSError, ValueError):
            pass  # it does not listen yet, or is not ready: status 503
        time.sleep(_POLL_S)
    how = f"was not ready within {START_S:g} s" if up.poll() is None else f"ended with exit code {up.returncode}"
    raise CommandFailed(f"the service {how}; see {log}")
