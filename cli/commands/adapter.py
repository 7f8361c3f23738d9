"""Flags of `baton adapter`."""

from typing import Annotated

import typer

from baton.cli import options
from baton.cli.options import DEFAULT_TARGET

app = typer.Typer(help="Load, list and unload LoRA adapters of a running service.", no_args_is_help=True)


@app.command()
def load(
    name: Annotated[str, typer.Argument(help="Name that requests give as their model.")],
    path: Annotated[str, typer.Argument(help="Folder in PEFT's format, at the same path on workers.")],
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Replace an adapter of that name; running requests keep the old one."),
    ] = False,
    target: options.Target = DEFAULT_TARGET,
    admin: options.Admin = None,
) -> None:
    """Load an adapter on all workers. If one worker refuses, none keeps it."""
    from baton.cli.adapters.command import load_adapter

    raise typer.Exit(load_adapter(admin or options.admin_target_of(target), name, path, replace))


@app.command("list")
def list_(json: options.Json = False, target: options.Target = DEFAULT_TARGET, admin: options.Admin = None) -> None:
    """List adapters, the workers that have them, and why others do not."""
    from baton.cli.adapters.command import list_adapters

    raise typer.Exit(list_adapters(admin or options.admin_target_of(target), json))


@app.command()
def unload(
    name: Annotated[str, typer.Argument(help="Name in `baton adapter list`.")],
    wait: Annotated[float, typer.Option(min=0, max=600, help="Seconds to wait for running requests.")] = 30,
    target: options.Target = DEFAULT_TARGET,
    admin: options.Admin = None,
) -> None:
    """Reject new requests for an adapter immediately, and free it once running ones have completed.

    Exit code 3: some requests still run after --wait; they continue.
    """
    from baton.cli.adapters.command import unload_adapter

    raise typer.Exit(unload_adapter(admin or options.admin_target_of(target), name, wait))
