"""Flags of `baton up`."""

import os
from dataclasses import replace

import typer

from baton.cli.options import VARIABLES_PREFIX, flags_of
from baton.cli.up_options import UpOptions


@flags_of
def up(options: UpOptions) -> None:
    """Start router, workers and Redis on this machine; Ctrl-C drains and stops them."""
    if options.colocated and options.prefill:
        raise typer.BadParameter("--colocated allows no prefill workers", param_hint="--prefill")
    if (options.speculate == "draft") != (options.draft_model is not None):
        raise typer.BadParameter("must be given together with --speculate draft", param_hint="--draft-model")
    if (options.tls_cert is None) != (options.tls_key is None):
        raise typer.BadParameter("must be given together with --tls-key", param_hint="--tls-cert")
    from baton.cli.up import run_up

    raise typer.Exit(run_up(replace(options, adapter=_separated(options.adapter or []))))


def _separated(given: list[str]) -> list[str]:
    """Split BATON_ADAPTER at commas, as processes do; typer has split it at white space."""
    text = os.environ.get(f"{VARIABLES_PREFIX}_ADAPTER", "")
    return text.split(",") if text and given == text.split() else given
