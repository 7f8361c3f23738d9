"""The `baton` command and its subcommands, whose flags are in cli/commands."""

import sys
from importlib.util import find_spec

import typer
from typer.completion import completion_init  # type: ignore[attr-defined]

from baton.cli.commands import adapter, agents, ask, cache, change, inspect, installation, keys, offline, up
from baton.cli.options import VARIABLES_PREFIX, status_legend
from baton.launch import CommandFailed
from baton.process.config import ConfigError

# `baton test` passes unknown flags, such as -h, to pytest.
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["--help"]}
AGENT_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
# What follows the agent's name belongs to the agent.

app = typer.Typer(
    name="baton",
    help="Serve large language models with prefill and decode on separate workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
SERVE, ASK, WATCH, CHANGE, MEASURE, INSTALLATION = (
    "Serve", "Ask", "Watch and explain", "Change a running service", "Plan and measure", "Installation",
)  # fmt: skip
# Each flag of `up` is also a BATON_* variable, like the flags of the processes that it starts.
app.command(rich_help_panel=SERVE, context_settings={"auto_envvar_prefix": VARIABLES_PREFIX})(up.up)
app.command(rich_help_panel=SERVE, context_settings=AGENT_ARGUMENTS)(agents.launch)
app.add_typer(keys.app, name="keys", rich_help_panel=SERVE)
app.command(rich_help_panel=SERVE)(keys.certs)
for command in (ask.chat, ask.generate, offline.batch):
    app.command(rich_help_panel=ASK)(command)
app.command(rich_help_panel=WATCH, epilog=status_legend())(inspect.status)
for command in (inspect.top, inspect.why, inspect.timeline, inspect.bundle, inspect.health):
    app.command(rich_help_panel=WATCH)(command)
for command in (inspect.explain, inspect.trace):  # former names, kept for one release
    app.command(rich_help_panel=WATCH, hidden=True)(command)
app.add_typer(adapter.app, name="adapter", rich_help_panel=CHANGE)
for command in (change.reload, change.role):
    app.command(rich_help_panel=CHANGE)(command)
app.add_typer(cache.app, name="cache", rich_help_panel=CHANGE)
app.command(rich_help_panel=MEASURE)(offline.plan)
if find_spec("baton.lab") is not None:  # the distribution baton-lab is installed
    from baton.lab.commands import bench, develop, replay, size

    app.command(rich_help_panel=WATCH)(replay.replay)
    for command in (size.size, develop.simulate):
        app.command(rich_help_panel=MEASURE)(command)
    app.add_typer(bench.app, name="bench", rich_help_panel=MEASURE)
    app.add_typer(develop.chaos_app, name="chaos", rich_help_panel=MEASURE)
    app.command(rich_help_panel=INSTALLATION, context_settings=PASS_ON)(develop.test)
app.command(rich_help_panel=INSTALLATION)(installation.version)
app.command(rich_help_panel=INSTALLATION)(installation.completion)


def main() -> None:
    """Run the `baton` command."""
    completion_init()  # lets `baton completion` work; typer's own flags would write to the user's files
    try:
        app(prog_name="baton")
    except (CommandFailed, ConfigError) as error:
        print(f"baton: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
