"""Agents that `baton bench clients agents` runs: versions, flags without a terminal, and their tools."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton.lab.benchmarks.agents.figures import TARGET_SHARE
from baton.lab.benchmarks.agents.work import NOTES, PROMPT, RESTARTING, Call, SessionWork, TextWork, ToolWork, waiting

PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")


@dataclass(frozen=True, slots=True)
class TestedAgent:
    """Agent and its work. `script`: run by npm after the installation, but not if the user's npm forbids scripts.

    `repeats_broken`: whether it repeats a request whose answer breaks off, as when the router is killed.
    `repeats`: minimum share of the previous prompt that the next one repeats.
    """

    version: str
    flags: Sequence[str]
    work: SessionWork
    script: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)  # files of its home
    repeats: float = TARGET_SHARE
    repeats_broken: bool = True


def _codex_run(command: str) -> Call:
    return "exec_command", {"cmd": command}


TESTED: Mapping[str, TestedAgent] = {
    "claude": TestedAgent(
        "2.1.197",
        ("-p", PROMPT, "--allowedTools", "Bash,Read,Edit"),
        ToolWork(
            lambda command: ("Bash", {"command": command, "description": "Append a number"}),
            lambda path: ("Read", {"file_path": str(path)}),
            lambda path, old, new: ("Edit", {"file_path": str(path), "old_string": old, "new_string": new}),
        ),
        "install.cjs",
    ),
    "codex": TestedAgent(
        "0.171.0",
        ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", PROMPT),
        ToolWork(
            _codex_run,
            lambda path: _codex_run(f"cat {path}"),
            lambda path, old, new: _codex_run(f"sed -i 's/{old}/{new}/' {path}"),
        ),
    ),
    "opencode": TestedAgent(
        "1.18.33",
        ("run", PROMPT),
        ToolWork(
            lambda command: ("bash", {"command": command, "description": "Append a number"}),
            lambda path: ("read", {"filePath": str(path)}),
            lambda path, old, new: ("edit", {"filePath": str(path), "oldString": old, "newString": new}),
        ),
        "postinstall.mjs",
        variables={"OPENCODE_DISABLE_MODELS_FETCH": "1"},
    ),
    "qwen": TestedAgent(
        "0.15.10",
        ("--yolo", "-p", PROMPT),
        ToolWork(
            lambda command: (
                "run_shell_command",
                {"command": command, "description": "Append a number", "is_background": False},
            ),
            lambda path: ("read_file", {"file_path": str(path)}),
            lambda path, old, new: ("edit", {"file_path": str(path), "old_string": old, "new_string": new}),
        ),
        # Its HTTP client knows no exceptions to a proxy, so its settings turn off what it sends elsewhere.
        variables=dict.fromkeys(PROXIES, ""),
        files={
            ".qwen/settings.json": '{"privacy": {"usageStatisticsEnabled": false}, "telemetry": {"enabled": false}}'
        },
        repeats_broken=False,
    ),
    "continue": TestedAgent(
        "1.5.47",
        ("--auto", "-p", PROMPT),
        ToolWork(
            lambda command: ("Bash", {"command": command}),
            lambda path: ("Read", {"filepath": str(path)}),
            lambda path, old, new: ("Edit", {"file_path": str(path), "old_string": old, "new_string": new}),
        ),
        variables={"CONTINUE_TELEMETRY_ENABLED": "0"},
        repeats_broken=False,
    ),
    "aider": TestedAgent(
        "0.86.2",
        (
            *("--yes-always", "--no-git", "--no-check-update", "--analytics-disable", "--no-show-model-warnings"),
            *("--no-show-release-notes", "--no-auto-lint", "--no-pretty", "--edit-format", "diff"),
            *("--max-chat-history-tokens", "100000"),  # no summary, which would replace the conversation
            *("--auto-test", "--test-cmd", f"{TextWork.COMMAND}; {waiting('$' + RESTARTING)}", NOTES),
        ),
        TextWork(),
        repeats=0.5,  # it sends the files again behind the conversation
    ),
}
