"""`baton keys` and `baton certs`: their flags."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="API keys: which callers are served, within which limits.", no_args_is_help=True)


@app.callback()
def keys() -> None:
    """A command of its own, so that `new` is one below it."""


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Name of the caller; pending requests take turns by it.")],
    file: Annotated[Path, typer.Option("--file", help="File that its hash is appended to; created if missing.")],
    admin: Annotated[bool, typer.Option("--admin", help="Allow admin routes too, such as /metrics.")] = False,
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="Most requests a minute.")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Most tokens a minute, of prompts and answers.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Most requests at once; each prompt of a list is one.")
    ] = None,
    max_context_tokens: Annotated[int | None, typer.Option(min=2, help="Longest prompt plus answer.")] = None,
) -> None:
    """Make a key, print it once, and append its hash to the file that `baton up --api-keys` reads.

    Routers that share a Redis share these limits; without one, each router counts by itself. Removing a key's line from
    the file revokes the key within a second.
    """
    from baton.cli.keys import append_key
    from baton.process.security.api_keys import KeyLimits

    limits = KeyLimits(requests_per_minute, tokens_per_minute, concurrency, max_context_tokens)
    secret = append_key(file, name, limits, admin)
    typer.echo(f"{file} has the hash of the key. The key itself is shown only here:", err=True)
    typer.echo(secret)


def certs(
    folder: Annotated[Path, typer.Argument(help="Folder for the files; created if missing.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="Name or address that clients use, beside localhost, 127.0.0.1 and ::1; may be repeated."),
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=3650, help="Days until they expire.")] = 90,
) -> None:
    """Make certificates for development: ca.pem, server.pem and server-key.pem for the public ports; internal-ca.pem,
    internal.pem and internal-key.pem for router and workers, which then accept only each other.

    The keys of both CAs are deleted: neither can sign another certificate.
    """
    from baton.cli.keys import make_certificates

    make_certificates(folder, host or (), days)
    typer.echo(f"serve with   --tls-cert {folder / 'server.pem'} --tls-key {folder / 'server-key.pem'}")
    typer.echo(f"ask with     BATON_TLS_CA={folder / 'ca.pem'}")
    names = (("CA", "internal-ca"), ("CERT", "internal"), ("KEY", "internal-key"))
    variables = " ".join(f"BATON_INTERNAL_TLS_{what}={folder / name}.pem" for what, name in names)
    typer.echo(f"router and workers, all of them: {variables}")
