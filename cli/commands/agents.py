"""Flags of `baton launch`."""

from typing import Annotated

import typer


def launch(
    context: typer.Context,
    agent: Annotated[
        str,
        typer.Argument(help="claude, codex, opencode, qwen, continue or aider; its own arguments may follow."),
    ],
    url: Annotated[
        str | None,
        typer.Option(help="HTTP address of the service. Default: the newest `baton up` on this machine, or a new one."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Start a service with this model, as `baton up --model`.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Print variables and command line instead.")] = False,
) -> None:
    """Start a coding agent that uses a running service, or a service that is started for it. Files of the agent are not
    changed.
    """
    from baton.cli.agents import AGENTS, run_agent

    if agent not in AGENTS:
        raise typer.BadParameter(f"{agent!r} is none of {', '.join(AGENTS)}", param_hint="agent")
    raise typer.Exit(run_agent(agent, context.args, url, model, show))
