"""`baton adapter`: its flags."""

from typing import Annotated

import typer

from baton.cli import options
from baton.cli.options import DEFAULT_TARGET

app = typer.Typer(help="LoRA adapters of a running service: load, list, unload.", no_args_is_help=True)


@app.command()
def load(
    name: Annotated[str, typer.Argument(help="By which requests choose it as their model.")],
    path: Annotated[str, typer.Argument(help="Its folder, as PEFT saves it and as workers see it.")],
    replace: Annotated[
        bool, typer.Option("--replace", help="In place of another one of that name; requests that run end with that.")
    ] = False,
    target: options.Target = DEFAULT_TARGET,
    admin: options.Admin = None,
) -> None:
    """Load an adapter on all workers: requests can choose it once this ends. If one worker refuses, none keeps it."""
    from baton.cli.adapters.command import load_adapter

    raise typer.Exit(load_adapter(admin or options.admin_target_of(target), name, path, replace))


@app.command("list")
def list_(json: options.Json = False, target: options.Target = DEFAULT_TARGET, admin: options.Admin = None) -> None:
    """List adapters, the workers that have them, and why others do not."""
    from baton.cli.adapters.command import list_adapters

    raise typer.Exit(list_adapters(admin or options.admin_target_of(target), json))


@app.command()
def unload(
    name: Annotated[str, typer.Argument(help="As `baton adapter list` names it.")],
    wait: Annotated[float, typer.Option(min=0, max=600, help="Seconds to wait for requests that run with it.")] = 30,
    target: options.Target = DEFAULT_TARGET,
    admin: options.Admin = None,
) -> None:
    """Refuse new requests for an adapter at once; workers free it when those that run with it have ended.

    Exit code 3: some still run after --wait. They go on.
    """
    from baton.cli.adapters.command import unload_adapter

    raise typer.Exit(unload_adapter(admin or options.admin_target_of(target), name, wait))
