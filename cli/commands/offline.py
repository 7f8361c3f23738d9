"""Commands `baton plan` and `baton batch`, which need no server."""

import typer

from baton.cli.offline_options import BatchOptions, PlanOptions
from baton.cli.options import flags_of


@flags_of
def plan(options: PlanOptions) -> None:
    """Compute a model's memory and the number of requests that fit, without loading it."""
    from baton.cli.plan import run_plan

    raise typer.Exit(run_plan(options))


@flags_of
def batch(options: BatchOptions) -> None:
    """Answer a file of requests without a server. An interrupted run continues when it is repeated."""
    from baton.cli.batch import run_batch

    raise typer.Exit(run_batch(options))
