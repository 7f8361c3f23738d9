"""Commands about the installation: `baton completion` and `baton version`."""

import shlex
from enum import StrEnum
from typing import Annotated

import typer
from typer.completion import get_completion_script  # type: ignore[attr-defined]

from baton.launch.paths import ROOT

PROGRAM = "baton"
VARIABLE = "_BATON_COMPLETE"  # environment variable with which the completion script asks for completions
CALLS = ("=complete_zsh ", "(commandline -cp) ")
"""Texts before the program's name where zsh's and fish's scripts call it; bash's script calls what the user typed."""


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(shell: Annotated[Shell, typer.Argument(help="Shell that the script is for.")]) -> None:
    """Print a completion script: source <(./baton completion bash), or zsh; ./baton completion fish | source."""
    script = get_completion_script(prog_name=PROGRAM, complete_var=VARIABLE, shell=shell)
    for call in CALLS:  # the script calls `baton` by its absolute path, since it may not be on PATH
        script = script.replace(f"{call}{PROGRAM}", f"{call}{shlex.quote(str(ROOT / PROGRAM))}")
    typer.echo(script)


def version(json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False) -> None:
    """Show release, protocol, commit, native kernels and libraries of this installation."""
    from dataclasses import asdict
    from json import dumps

    from baton.cli.installed import installed, lines

    found = installed(("torch", "transformers", "grpcio"))
    print(dumps(asdict(found)) if json else "\n".join(lines(found)))
