"""Command `baton size`."""

import typer

from baton.cli.options import flags_of
from baton.lab.commands.size_options import SizeOptions


@flags_of
def size(options: SizeOptions) -> None:
    """Compute how many prefill and decode workers a load needs, by simulation of the real router and schedulers with
    step costs measured on the device.

    Exit code 1 if even --most-workers do not suffice.
    """
    from baton.lab.sizing.command import run_size

    raise typer.Exit(run_size(options))
