"""Command `baton bench clients agents`: sessions of unmodified coding agents, with scripted answers.

Each agent runs in a folder and a home of its own, with a proxy that refuses every connection beyond loopback. Files
show whether a call was lost, doubled or altered. The workers compute real KV: the trace shows which part of the prompts
came from caches and files.
"""

import asyncio
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from baton.cli.agents import AGENTS, ANY_KEY, service_at
from baton.lab.benchmarks.agents.figures import TARGET_SHARE, MeasuredSession, measure
from baton.lab.benchmarks.agents.stack import BLOCK_TOKENS, KINDS, READY_S, AgentsStack
from baton.lab.benchmarks.agents.tested import PROXIES, TESTED
from baton.lab.benchmarks.agents.work import CALLS, NOTES, RESTARTING, notes
from baton.lab.benchmarks.agents.worker import SessionAnswers
from baton.lab.commands.bench_options import AgentsOptions
from baton.lab.harness.processes import HOST
from baton.lab.report.picture import Axis, DrawnCurve, LineChart, draw_lines
from baton.lab.report.result import SERVICE, judge_rounds, make_result, table, write_pictures
from baton.launch import CommandFailed
from baton.launch.paths import ROOT
from baton.launch.tiny_checkpoint import write_tiny_checkpoint

CONTEXT_TOKENS = 1 << 17
_NO_PROXY = f"http://{HOST}:9"  # the discard port, on which nothing listens
_SESSION_S, _TIMED_OUT = 900.0, 124  # longest session, and the exit code of a session that was longer
_PROMISE = f"no turn fails, no call is lost, doubled or altered, {TARGET_SHARE:.0%} of the reusable tokens are cached"


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
        works = self.exit_code == 0 and self.calls_exact and len(self.killed) == self.kills
        repeats = self.session.repeated_share >= TESTED[self.agent].repeats
        return works and repeats and self.session.cached_share >= TARGET_SHARE

    @property
    def chart(self) -> LineChart:
        """Return a chart of the time to first token by turn."""
        points = tuple((each.step, each.ttft_ms) for each in self.session.turns if each.step is not None)
        title = f"{self.agent} {self.version}: time to first token"
        return LineChart(title, Axis("turn"), Axis("ms", is_log=True), (DrawnCurve("TTFT", points),))

    def as_json(self) -> dict[str, Any]:
        ttft = self.session.ttft
        return {**asdict(self), "cached_share": self.session.cached_share, "ttft": ttft and asdict(ttft)}


def run_agents_bench(options: AgentsOptions) -> int:
    """Run a session of each agent, and print the figures. Return 1 if one of them failed. Raises: CommandFailed."""
    names = options.only or list(TESTED)
    folder = options.folder.expanduser().absolute()
    install(folder, names)
    kinds = KINDS if options.kills else ()
    figures = [asyncio.run(session(name, folder, options.turns, kinds)) for name in names]
    write_pictures(options.pictures, {each.agent: draw_lines(each.chart) for each in figures})
    if options.json:
        verdict = judge_rounds(_PROMISE, (each.is_good for each in figures), "sessions")
        print(json.dumps(make_result(SERVICE, [each.as_json() for each in figures], verdict), indent=2))
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
    """Install the tested versions from npm's registry and PyPI. Raises: CommandFailed."""
    lacking = [name for name in names if _installed_version(folder, name) != TESTED[name].version]
    if packages := [f"{AGENTS[name].package}@{TESTED[name].version}" for name in lacking if not _is_python(name)]:
        npm = shutil.which("npm")
        if npm is None:
            raise CommandFailed("npm is not on PATH; install Node.js 20 or newer")
        folder.mkdir(parents=True, exist_ok=True)
        flags = ("--no-audit", "--no-fund", "--save-exact", "--prefix", str(folder))
        _install_by([npm, "install", *flags, *packages])
    for name in lacking:
        if _is_python(name):
            _install_by([sys.executable, "-m", "venv", str(folder / name)])
            pip = [str(folder / name / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
            _install_by([*pip, f"{AGENTS[name].package}=={TESTED[name].version}"])
        elif (script := TESTED[name].script) is not None:
            subprocess.run(["node", script], cwd=_package(folder, name), check=True, stdout=subprocess.DEVNULL)


def _install_by(command: Sequence[str]) -> None:
    if subprocess.run(command).returncode:
        raise CommandFailed(f"not installed: {shlex.join(command)}")


def _is_python(name: str) -> bool:
    return AGENTS[name].is_python


def _program(folder: Path, name: str) -> Path:
    programs = folder / name / "bin" if _is_python(name) else folder / "node_modules" / ".bin"
    return programs / AGENTS[name].program


def _package(folder: Path, name: str) -> Path:
    return folder / "node_modules" / AGENTS[name].package


def _installed_version(folder: Path, name: str) -> str | None:
    if _is_python(name):
        found = distributions(
            name=AGENTS[name].package, path=[str(each) for each in (folder / name).glob("lib/*/site-packages")]
        )
        return next((each.version for each in found), None)
    path = _package(folder, name) / "package.json"
    version: str | None = json.loads(path.read_text())["version"] if path.exists() else None
    return version


async def session(name: str, folder: Path, turns: int, kills: Sequence[str] = ()) -> AgentFigures:
    """Run one session of an agent against a service of its own. `kills`: kinds of processes to kill.

    Raises: CommandFailed, NotWhole.
    """
    tested = TESTED[name]
    with ExitStack() as held:
        service_folder, home, scratch = (Path(held.enter_context(_scratch())) for _ in range(3))
        (scratch / NOTES).write_text(notes(0))
        (scratch / CALLS).touch()
        restarting = service_folder / "restarting"
        stack = _make_stack(service_folder, tested.work.answers(scratch, turns, restarting))
        killed: list[str] = []
        await stack.start()
        try:
            await stack.wait_whole(READY_S)
            stack.mark_ready()
            started = None if tested.repeats_broken else scratch / CALLS
            killing = asyncio.create_task(stack.kill_each(kills, turns, restarting, killed, started))
            variables = {**_environment(home), RESTARTING: str(restarting)}
            done = await asyncio.to_thread(_run, name, folder, stack.url, home, scratch, variables, turns)
            killing.cancel()
            await asyncio.gather(killing, return_exceptions=True)
        finally:
            await stack.stop()
        spans = [json.loads(line) for line in stack.trace_file.read_text().splitlines()]
        measured = measure(stack.prompt_events(), spans, BLOCK_TOKENS)
        exact = tested.work.is_exact(scratch, turns)
    if done.returncode or not exact:
        print((done.stdout + done.stderr).decode(errors="replace")[-2000:], file=sys.stderr)
    return AgentFigures(name, tested.version, done.returncode, exact, measured, len(kills), killed)


def _make_stack(folder: Path, answers: SessionAnswers) -> AgentsStack:
    """Write a model and a script; return a service that answers from it. The tokenizer learns from documents."""
    model, script, record = folder / "tiny", folder / "script.json", folder / "prompts.jsonl"
    pages = sorted((ROOT / "docs").glob("*.md"))
    write_tiny_checkpoint(model, context_tokens=CONTEXT_TOKENS, texts=[page.read_text() for page in pages])
    script.write_text(json.dumps(asdict(answers)))
    record.touch()
    return AgentsStack(folder, model, script, record)


def _run(
    name: str, folder: Path, url: str, home: Path, scratch: Path, variables: Mapping[str, str], turns: int
) -> "subprocess.CompletedProcess[bytes]":
    """Run an agent to its end, for a bounded time. Raises: CommandFailed."""
    tested, start = TESTED[name], AGENTS[name].start(service_at(url, ANY_KEY, home / ".baton"))
    command = [str(_program(folder, name)), *start.command[1:], *tested.flags]
    start.write_files()
    for path, text in tested.files.items():
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(text)
    environment = {**variables, **start.variables, **tested.variables}
    entered = home / "entered"
    entered.write_text(tested.work.stdin(turns))
    try:
        with entered.open() as stdin:
            return subprocess.run(
                command, cwd=scratch, env=environment, stdin=stdin, capture_output=True, timeout=_SESSION_S
            )
    except subprocess.TimeoutExpired as error:
        return subprocess.CompletedProcess(command, _TIMED_OUT, error.stdout or b"", error.stderr or b"")


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
