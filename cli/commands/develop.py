"""`baton test`, `completion` and `version`."""

import shlex
from enum import StrEnum
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import Annotated

import typer
from typer.completion import get_completion_script  # type: ignore[attr-defined]

from baton.launch.paths import ROOT


def test(
    context: typer.Context,
    no_skips: Annotated[
        bool, typer.Option("--no-skips", help="Fail where a test was skipped but for want of a GPU or AVX-512.")
    ] = False,
) -> None:
    """Check style and types and run the tests. Arguments go to pytest, which then runs alone."""
    from baton.cli.checks import run_checks

    raise typer.Exit(run_checks(context.args, no_skips))


PROGRAM = "baton"
VARIABLE = "_BATON_COMPLETE"  # through which the script asks the command for completions
CALLS = ("=complete_zsh ", "(commandline -cp) ")
"""What stands before the program's name where a script calls it. The one for bash calls what the user typed."""


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(shell: Annotated[Shell, typer.Argument(help="Which shell the script is for.")]) -> None:
    """Print a completion script: source <(./baton completion bash), or zsh; ./baton completion fish | source."""
    script = get_completion_script(prog_name=PROGRAM, complete_var=VARIABLE, shell=shell)
    for call in CALLS:  # `baton` need not be on PATH
        script = script.replace(f"{call}{PROGRAM}", f"{call}{shlex.quote(str(ROOT / PROGRAM))}")
    typer.echo(script)


def version() -> None:
    """Versions of Baton and of the libraries it computes with."""
    for package in ("baton-serve", "torch", "transformers", "grpcio"):
        try:
            found = installed_version(package)
        except PackageNotFoundError:
            # A checkout that runs without an installation, or an image that leaves out what it does not need.
            found = "(not installed)"
        print(f"{package} {found}")
