"""Start a coding agent that uses a running service, without a change of the agent's own files (`baton launch`).

Agents are configured by environment variables and flags only, so they work as before when they are started directly.
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
from typing import Any

from baton.cli.connection import API_KEY_VARIABLE
from baton.launch import CommandFailed
from baton.launch.paths import RUNTIME
from baton.launch.run_record import running_services
from baton.process.private_files import private_folder

ANY_KEY = "baton"
"""Key that agents send to a service without API keys: they refuse to start without one."""
START_S = 600.0
_POLL_S = 0.5
_ANSWER_SHARE = 4  # an answer has at most this part of the context; agents shorten conversations accordingly


@dataclass(frozen=True, slots=True)
class Service:
    """Address and model of a service. `context_tokens`: limit of prompt and answer together."""

    url: str
    model: str
    context_tokens: int
    key: str = ANY_KEY


@dataclass(frozen=True, slots=True)
class Start:
    """Command line of an agent, and environment variables to set."""

    command: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)


def _claude(service: Service) -> Start:
    sizes = (f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU"))
    models = ("ANTHROPIC_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL", *sizes)
    variables = {
        "ANTHROPIC_BASE_URL": service.url,
        "ANTHROPIC_AUTH_TOKEN": service.key,
        "ANTHROPIC_API_KEY": "",  # else the user's own key would be sent
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(service.context_tokens // _ANSWER_SHARE),
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
    limit = {"context": service.context_tokens, "output": service.context_tokens // _ANSWER_SHARE}
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


AGENTS: Mapping[str, tuple[Callable[[Service], Start], str]] = {
    "claude": (_claude, "@anthropic-ai/claude-code"),
    "codex": (_codex, "@openai/codex"),
    "opencode": (_opencode, "opencode-ai"),
    "qwen": (_qwen, "@qwen-code/qwen-code"),
}
"""Function that returns how to start an agent for a service, and npm package, by the name of the agent."""


def run_agent(agent: str, further: Sequence[str], url: str | None, model: str | None, only_show: bool) -> int:
    """Start an agent for a service, and the service if none runs. Return the agent's exit code. Raises: CommandFailed.

    `url`: address of the service; None: the newest on this machine. `model`: model to serve, if a service is started.
    """
    start, package = AGENTS[agent]
    if not only_show and shutil.which(agent) is None:
        raise CommandFailed(f"{agent} is not on PATH; install it: npm install -g {package}")
    with _served(url, model) as served:
        made = start(service_at(served, os.environ.get(API_KEY_VARIABLE) or ANY_KEY))
        command = [*made.command, *further]
        if only_show:
            assignments = [f"{name}={shlex.quote(value)}" for name, value in made.variables.items()]
            print(" ".join([*assignments, shlex.join(command)]))
            return 0
        return subprocess.run(command, env=os.environ | made.variables).returncode


def service_at(url: str, key: str) -> Service:
    """Ask a service for its model. Raises: CommandFailed."""
    try:
        models = _get(f"{url}/v1/models", key)["data"]
    except (OSError, ValueError) as error:
        raise CommandFailed(f"{url}/v1/models: no service answers: {error}") from error
    return Service(url, models[0]["id"], models[0]["max_model_len"], key)


def _get(url: str, key: str) -> Any:
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=5.0) as answer:
        return json.load(answer)


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
    log = private_folder(RUNTIME) / "launch.log"
    print(f"baton: starting a service; its output goes to {log}", file=sys.stderr)
    command = [sys.executable, "-P", "-m", "baton.cli", "up", *(("--model", model) if model else ())]
    with log.open("wb") as output:
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
