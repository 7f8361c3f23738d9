"""The `baton` command: which subcommands there are. Their flags lie in cli/commands."""

import sys

import typer
from typer.completion import completion_init  # type: ignore[attr-defined]

from baton.cli.commands import adapter, ask, bench, cache, develop, inspect, keys, offline, reload, size, up
from baton.cli.options import VARIABLES_PREFIX, status_legend
from baton.launch.errors import CommandFailed

# -h and the like are for pytest.
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["--help"]}

app = typer.Typer(
    name="baton",
    help="Serves large language models with prefill and decode on separate workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# Each of its flags can be given as a variable, as those of the processes that it starts can.
app.command(context_settings={"auto_envvar_prefix": VARIABLES_PREFIX})(up.up)
for command in (
    ask.generate,
    ask.chat,
    inspect.top,
    inspect.health,
    inspect.explain,
    inspect.timeline,
    inspect.why,
    inspect.role,
    reload.reload,
    offline.plan,
    size.size,
    offline.batch,
    inspect.trace,
    inspect.bundle,
    develop.simulate,
):
    app.command()(command)
app.command(epilog=status_legend())(inspect.status)
app.add_typer(bench.app, name="bench")
app.add_typer(adapter.app, name="adapter")
app.add_typer(keys.app, name="keys")
app.add_typer(cache.app, name="cache")
app.add_typer(develop.chaos_app, name="chaos")
app.command()(keys.certs)
app.command(context_settings=PASS_ON)(develop.test)
app.command()(develop.version)
app.command()(develop.completion)


def main() -> None:
    """Entry point of the `baton` script."""
    completion_init()  # for the scripts of `baton completion`; typer's own flags would write to the user's files
    try:
        app(prog_name="baton")
    except CommandFailed as error:
        print(f"baton: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
