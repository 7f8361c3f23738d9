"""Flags of `baton keys` and `baton certs`."""

from pathlib import Path
from typing import Annotated

import typer

from baton.process.objectives import LEAST_SLO_MS, MOST_SLO_MS, RequestedObjectives

app = typer.Typer(help="Create API keys with limits.", no_args_is_help=True)


@app.callback()
def keys() -> None:
    """Group the commands for API keys."""


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Name of the caller, by which requests are queued fairly.")],
    file: Annotated[Path, typer.Option("--file", help="File that the key's hash is appended to; created if missing.")],
    admin: Annotated[bool, typer.Option("--admin", help="Allow admin routes, such as /metrics.")] = False,
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="Maximum requests per minute.")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Maximum prompt and answer tokens per minute.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Maximum in-flight requests; each prompt of a list counts.")
    ] = None,
    max_context_tokens: Annotated[int | None, typer.Option(min=2, help="Maximum tokens of prompt plus answer.")] = None,
    ttft_slo_ms: Annotated[
        float | None,
        typer.Option(min=LEAST_SLO_MS, max=MOST_SLO_MS, help="TTFT objective of the key's requests, in milliseconds."),
    ] = None,
    tbt_slo_ms: Annotated[
        float | None,
        typer.Option(min=LEAST_SLO_MS, max=MOST_SLO_MS, help="TBT objective of the key's requests, in milliseconds."),
    ] = None,
) -> None:
    """Create a key, print it once, and append its hash to the file that `baton up --api-keys` reads.

    Routers with a common Redis share the limits; otherwise each router counts alone. Removing a key's line revokes the
    key within a second.
    """
    from baton.cli.keys import append_key
    from baton.process.security.api_keys import KeyLimits

    limits = KeyLimits(requests_per_minute, tokens_per_minute, concurrency, max_context_tokens)
    secret = append_key(file, name, limits, admin, RequestedObjectives(ttft_slo_ms, tbt_slo_ms))
    typer.echo(f"{file} has the hash of the key. The key itself is shown only here:", err=True)
    typer.echo(secret)


def certs(
    folder: Annotated[Path, typer.Argument(help="Folder for the files; created if missing.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="Name or address of the server, next to localhost, 127.0.0.1 and ::1; may be repeated."),
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=3650, help="Days until the certificates expire.")] = 90,
) -> None:
    """Create certificates for development: ca.pem, server.pem and server-key.pem for the public ports; internal-ca.pem,
    internal.pem and internal-key.pem for router and workers, which then accept only each other.

    The keys of both CAs are deleted, so neither can sign another certificate.
    """
    from baton.cli.keys import make_certificates

    make_certificates(folder, host or (), days)
    typer.echo(f"serve with   --tls-cert {folder / 'server.pem'} --tls-key {folder / 'server-key.pem'}")
    typer.echo(f"ask with     BATON_TLS_CA={folder / 'ca.pem'}")
    names = (("CA", "internal-ca"), ("CERT", "internal"), ("KEY", "internal-key"))
    variables = " ".join(f"BATON_INTERNAL_TLS_{what}={folder / name}.pem" for what, name in names)
    typer.echo(f"router and workers, all of them: {variables}")
