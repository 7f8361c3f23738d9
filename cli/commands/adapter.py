"""`baton adapter`: load, list and unload LoRA adapters over a router's admin port."""

import json as json_module
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from baton.cli import options
from baton.cli.options import DEFAULT_TARGET

LOAD_TIMEOUT_S = 90.0  # longer than the router waits for its workers
UNLOAD_MARGIN_S = 5.0
STILL_USED = 3  # exit code: requests still use the adapter after --wait

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
    from baton.cli.connection import admin_client

    folder = str(Path(path).expanduser().resolve())
    with admin_client(admin or options.admin_target_of(target)) as client:
        worker_ids = client.load_adapter(name, folder, replace=replace, timeout_s=LOAD_TIMEOUT_S)
    print(f"{name} is loaded on {', '.join(worker_ids)}")


@app.command("list")
def list_(json: options.Json = False, target: options.Target = DEFAULT_TARGET, admin: options.Admin = None) -> None:
    """List adapters, the workers that have them, and why others do not."""
    from baton.cli.connection import admin_client

    with admin_client(admin or options.admin_target_of(target)) as client:
        adapters = client.adapters()
    if json:
        print(json_module.dumps([asdict(each) for each in adapters]))
        return
    for each in adapters:
        origin = "from the start" if each.started else each.path or "unloaded, requests still run with it"
        print(f"{each.name}  {each.digest[:16]}  {origin}  on {', '.join(each.worker_ids) or 'no worker'}")
        for worker_id, why in each.missing.items():
            print(f"  not on {worker_id}: {why or 'it is being loaded'}")
    if not adapters:
        print("no adapters")


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
    from baton.cli.connection import admin_client
    from baton.client import ModelNotFound
    from baton.launch import CommandFailed

    try:
        with admin_client(admin or options.admin_target_of(target)) as client:
            worker_ids = client.unload_adapter(name, wait_s=wait, timeout_s=wait + UNLOAD_MARGIN_S)
    except ModelNotFound as error:
        raise CommandFailed(error.message) from error
    if worker_ids:
        print(f"{name} gets no new requests; some still run with it on {', '.join(worker_ids)}")
        raise typer.Exit(STILL_USED)
    print(f"{name} is unloaded")
