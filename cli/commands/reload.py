"""`baton reload`: its flags."""

from typing import Annotated

import typer

from baton.cli import options
from baton.cli.options import DEFAULT_TARGET


def reload(
    model: Annotated[
        str,
        typer.Option(help="Checkpoint folder, as workers see it too, or hub name. It may differ in its weights alone."),
    ],
    grace_s: Annotated[
        float,
        typer.Option(min=0, max=3600, help="Seconds for answers of the old weights to end; those that are left fail."),
    ] = 300,
    target: options.Target = DEFAULT_TARGET,
    admin: options.Admin = None,
) -> None:
    """Load other weights on all workers, without a restart: new requests are answered by them once this ends.

    Requests that run end with the weights that they began with. Memory holds both sets until then. If one worker
    refuses, none keeps the new weights.
    """
    from baton.cli.adapters.reload import reload as reload_weights

    raise typer.Exit(reload_weights(admin or options.admin_target_of(target), model, grace_s))
