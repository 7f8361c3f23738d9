"""Flags of `baton cache`."""

from pathlib import Path
from typing import Annotated

import typer

from baton.cli import options

app = typer.Typer(help="Inspect and clear KV in files (--kv-tier-dir).", no_args_is_help=True)
Directory = Annotated[Path, typer.Argument(help="Directory of --kv-tier-dir.", file_okay=False)]


@app.command("ls")
def list_segments(directory: Directory, json: options.Json = False) -> None:
    """List files with worker, size, blocks and model."""
    from baton.cli.cache.show import show_segments

    show_segments(directory, json)


@app.command("du")
def disk_use(directory: Directory, json: options.Json = False) -> None:
    """List workers with bytes, files and blocks, and whether they run."""
    from baton.cli.cache.show import show_owners

    show_owners(directory, json)


@app.command("clear")
def clear(
    directory: Directory,
    worker: Annotated[str | None, typer.Option(help="Worker whose files are removed; default: all.")] = None,
) -> None:
    """Remove the files of stopped workers. Exit code 1: files of a running worker were kept."""
    from baton.cli.cache.show import clear_owners

    raise typer.Exit(clear_owners(directory, worker))
