"""Command `baton bench clients agents`: sessions of unmodified coding agents, with scripted answers.

Each agent runs in a folder and a home of its own, with a proxy that refuses every connection beyond loopback. In turn,
the script lets it run a command, read a file and edit it. The files show whether a call was lost, doubled or altered.
The workers compute real KV: the trace shows which part of the prompts came from caches and files.
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
from baton.lab.benchmarks.agents.figures import TARGET_SHARE, MeasuredSession, measure
from baton.lab.benchmarks.agents.stack import BLOCK_TOKENS, KINDS, READY_S, AgentsStack
from baton.lab.commands.bench_options import AgentsOptions
from baton.lab.harness.processes import HOST
from baton.lab.report.result import make_result, table
from baton.launch import CommandFailed
from baton.launch.paths import ROOT
from baton.launch.tiny_checkpoint import write_tiny_checkpoint

CONTEXT_TOKENS = 1 << 17
_CALLS, _NOTES = "calls.txt", "notes.txt"
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
_NO_PROXY = f"http://{HOST}:9"  # the discard port, on which nothing listens
_SESSION_S, _TIMED_OUT = 900.0, 124  # longest session, and the exit code of a session that was longer

Call = tuple[str, Mapping[str, Any]]
"""Name of a tool, and arguments."""


@dataclass(frozen=True, slots=True)
class TestedAgent:
    """Version, flags without a terminal (`PROMPT` stands for the prompt), and calls of its tools.

    `run`: call for a command. `read`: call for a file. `edit`: call that replaces a text in a file. `script`: run by
    npm after the installation, but not if the user's npm forbids scripts.
    """

    version: str
    flags: Sequence[str]
    run: Callable[[str], Call]
    read: Callable[[Path], Call]
    edit: Callable[[Path, str, str], Call]
    script: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)  # files of its home


def _codex_run(command: str) -> Call:
    return "exec_command", {"cmd": command}


PROMPT = "Run the commands."
TESTED: Mapping[str, TestedAgent] = {
    "claude": TestedAgent(
        "2.1.197",
        ("-p", PROMPT, "--allowedTools", "Bash,Read,Edit"),
        lambda command: ("Bash", {"command": command, "description": "Append a number"}),
        lambda path: ("Read", {"file_path": str(path)}),
        lambda path, old, new: ("Edit", {"file_path": str(path), "old_string": old, "new_string": new}),
        "install.cjs",
    ),
    "codex": TestedAgent(
        "0.171.0",
        ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", PROMPT),
        _codex_run,
        lambda path: _codex_run(f"cat {path}"),
        lambda path, old, new: _codex_run(f"sed -i 's/{old}/{new}/' {path}"),
    ),
    "opencode": TestedAgent(
        "1.18.33",
        ("run", PROMPT),
        lambda command: ("bash", {"command": command, "description": "Append a number"}),
        lambda path: ("read", {"filePath": str(path)}),
        lambda path, old, new: ("edit", {"filePath": str(path), "oldString": old, "newString": new}),
        "postinstall.mjs",
        variables={"OPENCODE_DISABLE_MODELS_FETCH": "1"},
    ),
    "qwen": TestedAgent(
        "0.15.10",
        ("--yolo", "-p", PROMPT),
        lambda command: (
            "run_shell_command",
            {"command": command, "description": "Append a number", "is_background": False},
        ),
        lambda path: ("read_file", {"file_path": str(path)}),
        lambda path, old, new: ("edit", {"file_path": str(path), "old_string": old, "new_string": new}),
        # Its HTTP client knows no exceptions to a proxy, so its settings turn off what it sends elsewhere.
        variables=dict.fromkeys(PROXIES, ""),
        files={
            ".qwen/settings.json": '{"privacy": {"usageStatisticsEnabled": false}, "telemetry": {"enabled": false}}'
        },
    ),
}


@dataclass(frozen=True, slots=True)
class AgentFigures:
    """Result of an agent's session. `killed`: processes that were killed, of `kills` planned kills."""

    agent: str
    version: str
    exit_code: int
    calls_exact: bool
    session: MeasuredSession
    kills: int = 0
    killed: Sequence[str] = ()

    @property
    def is_good(self) -> bool:
        """Return whether nothing failed, and prompts repeat earlier ones, whose KV came from caches."""
        shares = (self.session.repeated_share, self.session.cached_share)
        works = self.exit_code == 0 and self.calls_exact and len(self.killed) == self.kills
        return works and min(shares) >= TARGET_SHARE

    def as_json(self) -> dict[str, Any]:
        ttft = self.session.ttft
        return {**asdict(self), "cached_share": self.session.cached_share, "ttft": ttft and asdict(ttft)}


def run_agents_bench(options: AgentsOptions) -> int:
    """Run a session of each agent, and print the figures. Return 1 if one of them failed. Raises: CommandFailed."""
    names = options.only or list(TESTED)
    folder = options.folder or ROOT / ".cache" / "agents"
    install(folder, names)
    kinds = KINDS if options.kills else ()
    figures = [asyncio.run(session(name, folder, options.turns, kinds)) for name in names]
    if options.json:
        print(json.dumps(make_result(["router", "http"], [each.as_json() for each in figures], None), indent=2))
    else:
        print(table(figures, _COLUMNS))
    return 0 if all(each.is_good for each in figures) else 1


def _ttft(each: AgentFigures) -> str:
    fit = each.session.ttft
    return "" if fit is None else f"{fit.p50_ms:.0f} ms, {fit.per_turn_ms:+.1f}, {100 * fit.per_new_token_ms:+.0f}"


_COLUMNS: Mapping[str, Callable[[AgentFigures], object]] = {
    "agent": lambda each: f"{each.agent} {each.version}",
    "exit": lambda each: each.exit_code,
    "answered": lambda each: len(each.session.turns),
    "unanswered": lambda each: each.session.unanswered,
    "calls": lambda each: "exact" if each.calls_exact else "WRONG",
    "killed": lambda each: ", ".join(each.killed),
    "last prompt": lambda each: each.session.last_prompt_tokens,
    "repeated": lambda each: f"{each.session.repeated_share:.2%}",
    "cached": lambda each: f"{each.session.cached_share:.2%}",
    "TTFT p50, per turn, per 100 new tokens": _ttft,
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


async def session(name: str, folder: Path, turns: int, kills: Sequence[str] = ()) -> AgentFigures:
    """Run one session of an agent against a service of its own. `kills`: kinds of processes to kill.

    Raises: CommandFailed, NotWhole.
    """
    tested = TESTED[name]
    with ExitStack() as held:
        service_folder, home, scratch = (Path(held.enter_context(_scratch())) for _ in range(3))
        (scratch / _NOTES).write_text(_edited(0))
        restarting = service_folder / "restarting"
        calls = [_call(tested, scratch, n, restarting) for n in range(turns)]
        stack = _make_stack(service_folder, [*map(_as_text, calls), "Done."])
        killed: list[str] = []
        await stack.start()
        try:
            await stack.wait_whole(READY_S)
            stack.mark_ready()
            killing = asyncio.create_task(stack.kill_each(kills, turns, restarting, killed))
            done = await asyncio.to_thread(_run, name, folder, stack.url, home, scratch)
            killing.cancel()
            await asyncio.gather(killing, return_exceptions=True)
        finally:
            await stack.stop()
        spans = [json.loads(line) for line in stack.trace_file.read_text().splitlines()]
        measured = measure(stack.prompt_events(), spans, BLOCK_TOKENS)
        exact = _is_exact(scratch, turns)
    if done.returncode or not exact:
        print((done.stdout + done.stderr).decode(errors="replace")[-2000:])
    return AgentFigures(name, tested.version, done.returncode, exact, measured, len(kills), killed)


def _make_stack(folder: Path, answers: Sequence[str]) -> AgentsStack:
    """Write a model and a script; return a service that answers from it. The tokenizer learns from documents."""
    model, script, record = folder / "tiny", folder / "script.json", folder / "prompts.jsonl"
    pages = sorted((ROOT / "docs").glob("*.md"))
    write_tiny_checkpoint(model, context_tokens=CONTEXT_TOKENS, texts=[page.read_text() for page in pages])
    script.write_text(json.dumps(answers))
    record.touch()
    return AgentsStack(folder, model, script, record)


def _run(name: str, folder: Path, url: str, home: Path, scratch: Path) -> "subprocess.CompletedProcess[bytes]":
    """Run an agent to its end, for a bounded time. Raises: CommandFailed."""
    tested, start = TESTED[name], AGENTS[name][0](service_at(url, ANY_KEY))
    command = [str(folder / "node_modules" / ".bin" / start.command[0]), *start.command[1:], *tested.flags]
    variables = {**_environment(home), **start.variables, **tested.variables}
    for path, text in tested.files.items():
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(text)
    try:
        return subprocess.run(
            command, cwd=scratch, env=variables, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SESSION_S
        )
    except subprocess.TimeoutExpired as error:
        return subprocess.CompletedProcess(command, _TIMED_OUT, error.stdout or b"", error.stderr or b"")


def _call(tested: TestedAgent, scratch: Path, number: int, restarting: Path) -> Call:
    """Return the call of a turn. Results of commands differ in length; commands take as long as `restarting` exists."""
    match number % 3:
        case 0:
            wait = f"while [ -e {restarting} ]; do sleep 0.2; done"
            return tested.run(f"echo {number} >> {_CALLS}; seq {25 * (number % 5)}; {wait}")
        case 1:
            return tested.read(scratch / _NOTES)
        case _:
            return tested.edit(scratch / _NOTES, _edited(number - 2).strip(), _edited(number + 1).strip())


def _edited(number: int) -> str:
    """Return the content of the notes before turn `number`, which runs a command."""
    return f"notes of turn {number}\n"


def _is_exact(scratch: Path, turns: int) -> bool:
    """Return whether each call had its effect once: later edits find only the text of the edit before them."""
    calls = scratch / _CALLS
    appended = calls.read_text().split() if calls.exists() else []
    edits = turns // 3
    return appended == [str(n) for n in range(0, turns, 3)] and (scratch / _NOTES).read_text() == _edited(3 * edits)


def _as_text(call: Call) -> str:
    name, arguments = call
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


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
