"""`baton test`: its flags."""

from typing import Annotated

import typer


def test(
    context: typer.Context,
    no_skips: Annotated[
        bool, typer.Option("--no-skips", help="Fail where a test was skipped but for want of a GPU or AVX-512.")
    ] = False,
) -> None:
    """Check style and types and run the tests. Arguments go to pytest, which then runs alone."""
    from baton.cli.checks import run_checks

    raise typer.Exit(run_checks(context.args, no_skips))
