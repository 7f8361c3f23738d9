"""Flags of `baton reload`."""

from typing import Annotated

import typer

from baton.cli import options
from baton.cli.options import DEFAULT_TARGET


def reload(
    model: Annotated[
        str,
        typer.Option(help="Checkpoint folder, at the same path on workers, or hub name. Only its weights may differ."),
    ],
    grace_s: Annotated[
        float,
        typer.Option(min=0, max=3600, help="Seconds for requests with the old weights to complete; the others fail."),
    ] = 300,
    target: options.Target = DEFAULT_TARGET,
    admin: options.Admin = None,
) -> None:
    """Load other weights on all workers without a restart. New requests use them once this command returns.

    Running requests complete with their old weights; until then memory has both sets. If one worker refuses, none keeps
    the new weights.
    """
    from baton.cli.adapters.reload import reload as reload_weights

    raise typer.Exit(reload_weights(admin or options.admin_target_of(target), model, grace_s))
