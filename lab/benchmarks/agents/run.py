"""Command `baton bench clients agents`: sessions of unmodified coding agents, with scripted answers.

Each agent runs in a folder and a home of its own, with a proxy that refuses every connection beyond loopback. The
script lets it call its shell once per turn; each call appends a number to a file, which shows whether a call was lost,
doubled or altered.
"""

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from baton.cli.agents import AGENTS, ANY_KEY, service_at
from baton.lab.commands.bench_options import AgentsOptions
from baton.lab.harness.processes import HOST, our_program, running, serves, tiny_model
from baton.lab.report.result import make_result, table
from baton.launch import CommandFailed
from baton.launch.paths import ROOT
from baton.process.registry.redis_server import free_ports

TARGET_SHARE = 0.99
_FILE = "calls.txt"
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
_NO_PROXY = f"http://{HOST}:9"  # the discard port, on which nothing listens


@dataclass(frozen=True, slots=True)
class TestedAgent:
    """Version, flags without a terminal (`PROMPT` stands for the prompt), and arguments of its shell for a command.

    `script`: run by npm after the installation, but not if the user's npm forbids scripts.
    """

    version: str
    flags: Sequence[str]
    shell: str
    arguments: Callable[[str], Mapping[str, Any]]
    script: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)  # files of its home


PROMPT = "Run the commands."
TESTED: Mapping[str, TestedAgent] = {
    "claude": TestedAgent(
        "2.1.197",
        ("-p", PROMPT, "--allowedTools", "Bash"),
        "Bash",
        lambda command: {"command": command, "description": "Append a number"},
        "install.cjs",
    ),
    "codex": TestedAgent(
        "0.171.0",
        ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", PROMPT),
        "exec_command",
        lambda command: {"cmd": command},
    ),
    "opencode": TestedAgent(
        "1.18.33",
        ("run", PROMPT),
        "bash",
        lambda command: {"command": command, "description": "Append a number"},
        "postinstall.mjs",
        variables={"OPENCODE_DISABLE_MODELS_FETCH": "1"},
    ),
    "qwen": TestedAgent(
        "0.15.10",
        ("--yolo", "-p", PROMPT),
        "run_shell_command",
        lambda command: {"command": command, "description": "Append a number", "is_background": False},
        # Its HTTP client knows no exceptions to a proxy, so its settings turn off what it sends elsewhere.
        variables=dict.fromkeys(PROXIES, ""),
        files={
            ".qwen/settings.json": '{"privacy": {"usageStatisticsEnabled": false}, "telemetry": {"enabled": false}}'
        },
    ),
}


@dataclass(frozen=True, slots=True)
class AgentFigures:
    """Result of an agent's session. `repeated_share`: part of the tokens of earlier turns that later prompts repeat."""

    agent: str
    version: str
    exit_code: int
    turns: int
    calls_exact: bool
    prompt_tokens: int
    repeated_share: float

    @property
    def is_good(self) -> bool:
        return self.exit_code == 0 and self.calls_exact and self.repeated_share >= TARGET_SHARE


def run_agents_bench(options: AgentsOptions) -> int:
    """Run a session of each agent, and print the figures. Return 1 if one of them failed. Raises: CommandFailed."""
    names = options.only or list(TESTED)
    folder = options.folder or ROOT / ".cache" / "agents"
    install(folder, names)
    figures = [asyncio.run(session(name, folder, options.turns)) for name in names]
    if options.json:
        print(json.dumps(make_result(["router", "http"], [asdict(each) for each in figures], None), indent=2))
    else:
        print(table(figures, _COLUMNS))
    return 0 if all(each.is_good for each in figures) else 1


_COLUMNS: Mapping[str, Callable[[AgentFigures], object]] = {
    "agent": lambda each: f"{each.agent} {each.version}",
    "exit": lambda each: each.exit_code,
    "turns": lambda each: each.turns,
    "calls": lambda each: "exact" if each.calls_exact else "WRONG",
    "last prompt": lambda each: each.prompt_tokens,
    "repeated": lambda each: f"{each.repeated_share:.2%}",
}


def install(folder: Path, names: Sequence[str]) -> None:
    """Install the tested versions from npm's registry. Raises: CommandFailed."""
    npm = shutil.which("npm")
    if npm is None:
        raise CommandFailed("npm is not on PATH; install Node.js 20 or newer")
    lacking = [name for name in names if not _is_installed(folder, name)]
    if not lacking:
        return
    packages = [f"{AGENTS[name][1]}@{TESTED[name].version}" for name in lacking]
    folder.mkdir(parents=True, exist_ok=True)
    command = [npm, "install", "--no-audit", "--no-fund", "--save-exact", "--prefix", str(folder), *packages]
    if subprocess.run(command).returncode:
        raise CommandFailed(f"npm could not install {' '.join(packages)}")
    for name in lacking:
        script = TESTED[name].script
        if script is not None:
            subprocess.run(["node", script], cwd=_package(folder, name), check=True, stdout=subprocess.DEVNULL)


def _package(folder: Path, name: str) -> Path:
    return folder / "node_modules" / AGENTS[name][1]


def _is_installed(folder: Path, name: str) -> bool:
    path = _package(folder, name) / "package.json"
    return path.exists() and json.loads(path.read_text())["version"] == TESTED[name].version


async def session(name: str, folder: Path, turns: int) -> AgentFigures:
    """Run one session of an agent against a router of its own. Raises: CommandFailed."""
    tested = TESTED[name]
    calls = [{"name": tested.shell, "arguments": tested.arguments(f"echo {n} >> {_FILE}")} for n in range(turns)]
    answers = [f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls]
    with ExitStack() as held:
        model = held.enter_context(tiny_model())
        home, scratch = (Path(held.enter_context(_scratch())) for _ in range(2))
        script, record = model / "script.json", model / "prompts.jsonl"
        script.write_text(json.dumps([*answers, "Done."]))
        record.touch()
        port, admin, http, prefill, decode = free_ports(5)
        at = (model / "tiny", prefill, decode, 1.0, script, record)
        workers = our_program("workers", model, "baton.lab.benchmarks.agents.worker", *at)
        members = f"prefill@{HOST}:{prefill},decode@{HOST}:{decode}"
        ports = ("--port", port, "--admin-port", admin, "--http-port", http, "--workers", members)
        router = our_program("router", model, "baton.router", *ports, "--log-level", "warning")
        async with running((workers, router), lambda: serves(f"{HOST}:{port}")):
            service = await asyncio.to_thread(service_at, f"http://{HOST}:{http}", ANY_KEY)
            start = AGENTS[name][0](service)
            command = [str(folder / "node_modules" / ".bin" / start.command[0]), *start.command[1:], *tested.flags]
            variables = {**_environment(home), **start.variables, **tested.variables}
            for path, text in tested.files.items():
                (home / path).parent.mkdir(parents=True, exist_ok=True)
                (home / path).write_text(text)
            done = await asyncio.to_thread(
                subprocess.run, command, cwd=scratch, env=variables, stdin=subprocess.DEVNULL, capture_output=True
            )
        written = (scratch / _FILE).read_text().split() if (scratch / _FILE).exists() else []
        prompts = [json.loads(line) for line in record.read_text().splitlines()]
    if done.returncode:
        print(done.stderr.decode(errors="replace")[-2000:])
    earlier = sum(each["earlier"] for each in prompts)
    return AgentFigures(
        agent=name,
        version=tested.version,
        exit_code=done.returncode,
        turns=len(prompts),
        calls_exact=written == [str(n) for n in range(turns)],
        prompt_tokens=prompts[-1]["tokens"] if prompts else 0,
        repeated_share=sum(each["repeated"] for each in prompts) / earlier if earlier else 0.0,
    )


def _scratch() -> "TemporaryDirectory[str]":
    """Return a folder that is removed at the end; agents may leave processes that still write to it."""
    return TemporaryDirectory(prefix="baton-agent-", ignore_cleanup_errors=True)


def _environment(home: Path) -> dict[str, str]:
    """Return the variables of an agent: its own home, and no way out except loopback."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "TERM": "dumb",
        "NO_PROXY": f"{HOST},localhost",
        "no_proxy": f"{HOST},localhost",
        **dict.fromkeys(PROXIES, _NO_PROXY),
    }
