"""`baton test`: its flags."""

import typer


def test(context: typer.Context) -> None:
    """Check style and types and run the tests. Arguments go to pytest, which then runs alone."""
    from cli.checks import run_checks

    raise typer.Exit(run_checks(context.args))
