"""`baton cache`: its flags."""

from pathlib import Path
from typing import Annotated

import typer

from baton.cli import options

app = typer.Typer(help="KV in files: the directory of --kv-tier-dir, seen from outside.", no_args_is_help=True)
Directory = Annotated[Path, typer.Argument(help="The directory that --kv-tier-dir names.", file_okay=False)]


@app.command("ls")
def list_segments(directory: Directory, json: options.Json = False) -> None:
    """Every file: its worker, its size, its blocks, and whose KV it has."""
    from baton.cli.cache.show import show_segments

    show_segments(directory, json)


@app.command("du")
def disk_use(directory: Directory, json: options.Json = False) -> None:
    """Bytes, files and blocks of each worker, and whether it runs now."""
    from baton.cli.cache.show import show_owners

    show_owners(directory, json)


@app.command("clear")
def clear(
    directory: Directory,
    worker: Annotated[str | None, typer.Option(help="Only the files of this worker.")] = None,
) -> None:
    """Remove the files of workers that do not run. Those of a worker that runs are left alone: exit code 1."""
    from baton.cli.cache.show import clear_owners

    raise typer.Exit(clear_owners(directory, worker))
