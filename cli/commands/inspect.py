"""Flags of `baton status`, `top`, `health`, `why`, `timeline` and `bundle`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from baton.cli import options
from baton.cli.options import DEFAULT_TARGET

Admins = Annotated[
    list[str] | None,
    typer.Option("--admin", help="Admin address of a router, host:port; may be repeated. Default: that of --target."),
]


def status(
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh each second until Ctrl-C.")] = False,
    json: options.Json = False,
    target: options.Target = DEFAULT_TARGET,
    admin: options.Admin = None,
) -> None:
    """Show workers, KV blocks, requests and latency of one router. Exit code 3: the router answers but is not ready.

    A wide terminal shows more columns, --json all figures. TTFT and TBT are of the requests that completed on this
    router in the last minute.
    """
    admin_target = admin or options.admin_target_of(target)
    if watch:
        from baton.cli.status import watch_status

        raise typer.Exit(watch_status(admin_target, json))
    from baton.cli.status import show_status

    raise typer.Exit(show_status(admin_target, json))


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one frame, as without a terminal.")] = False,
    target: options.Target = DEFAULT_TARGET,
    admin: options.Admin = None,
) -> None:
    """Show workers and the newest requests of one router, live. Enter shows where the time of a request went and which
    other request delayed it.
    """
    from baton.cli.top.watch import show_top

    raise typer.Exit(show_top(admin or options.admin_target_of(target), once))


def health(
    target: options.Target = DEFAULT_TARGET,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for an answer.")] = 2.0,
    tls_ca: options.TlsCa = None,
    internal: Annotated[
        bool,
        typer.Option("--internal", help="Check a worker, with BATON_INTERNAL_TLS_CA, _CERT and _KEY."),
    ] = False,
) -> None:
    """Check the health of a process (grpc.health.v1): exit code 0 if it serves, else 1. For container health checks."""
    import asyncio

    from baton.cli.connection import channel_opener
    from baton.launch.readiness import HealthState, check_health

    found = asyncio.run(check_health(target, timeout, channel_opener(tls_ca, internal)))
    print(found.value)
    raise typer.Exit(0 if found is HealthState.SERVING else 1)


def why(
    request_id: Annotated[
        str | None,
        typer.Argument(
            help="Id of the request, as its answer has it, or of its trace; a unique prefix suffices. Default: the "
            "slowest request of the last minute."
        ),
    ] = None,
    recent: Annotated[bool, typer.Option("--recent", help="List the newest requests, the newest first.")] = False,
    last: Annotated[int, typer.Option("--last", "-n", min=1, help="Number of requests that --recent lists.")] = 20,
    file: Annotated[
        Path | None,
        typer.Option(help="Trace file of `baton up`, or OTLP JSON of a collector, to read instead of asking a router."),
    ] = None,
    json: options.Json = False,
    target: options.Target = DEFAULT_TARGET,
    admin: Admins = None,
) -> None:
    """Explain one of the last 512 requests of a router: where its time went, its stalls and their causes, why it was
    placed as it was, which blocks were cached, and what its prompt would have cost on the decode worker.
    """
    from baton.cli.why import show

    if recent and request_id is not None:
        raise typer.BadParameter("lists all requests; omit either --recent or the request id", param_hint="--recent")
    if file is not None:
        raise typer.Exit(show.show_file(request_id, file, last, json))
    targets = admin or options.admin_target_of(target).split(",")
    raise typer.Exit(show.show_recent(last, targets, json) if recent else show.show_why(request_id, targets, json))


def explain(
    request_id: Annotated[str, typer.Argument(help="Id of the request.")],
    json: options.Json = False,
    target: options.Target = DEFAULT_TARGET,
    admin: Admins = None,
) -> None:
    """Renamed to `baton why ID`; will be removed in the next release."""
    from baton.cli.why import show

    _warn_renamed("explain ID", "why ID")
    targets = admin or options.admin_target_of(target).split(",")
    raise typer.Exit(show.show_why(request_id, targets, json, True))


def trace(
    last: Annotated[int, typer.Option("--last", "-n", min=1, help="Number of requests.")] = 3,
    file: Annotated[Path | None, typer.Option(help="File of spans.")] = None,
    json: options.Json = False,
    target: options.Target = DEFAULT_TARGET,
    admin: Admins = None,
) -> None:
    """Renamed to `baton why --recent`; will be removed in the next release."""
    _warn_renamed("trace", "why --recent")
    why(None, recent=True, last=last, file=file, json=json, target=target, admin=admin)


def _warn_renamed(old: str, new: str) -> None:
    print(f"baton: `{old}` is now `{new}`; the next release removes the old name", file=sys.stderr)


def timeline(
    request_id: Annotated[
        str | None, typer.Argument(help="Id of a completed request, or of its trace. Default: see --last.")
    ] = None,
    last: Annotated[str, typer.Option(help="Time to look back, such as 30s, 500ms or 2m.")] = "30s",
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("timeline.json"),
    target: options.Target = DEFAULT_TARGET,
    admin: options.Admin = None,
) -> None:
    """Write the recent activity of router and workers, or that around one request, as a file for ui.perfetto.dev.

    Shows each worker's steps (answers, prompt tokens, moved blocks), transfers, requests, KV blocks and queue, and the
    router's requests with stages and stalls.
    """
    from baton.cli.timeline.command import write_timeline

    raise typer.Exit(write_timeline(request_id, last, out, admin or options.admin_target_of(target)))


def bundle(
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Archive to write; default: baton-bundle-TIME.tar.gz.")
    ] = None,
    admin: Annotated[
        list[str] | None,
        typer.Option(help="Admin address of a router, host:port; may be repeated. Default: those that run here."),
    ] = None,
    with_tokens: Annotated[
        bool,
        typer.Option(
            "--with-tokens",
            help="Include the token ids of prompts and answers, for `baton replay --model`, from routers with "
            "--record-tokens-mib.",
        ),
    ] = False,
    http: Annotated[list[str] | None, typer.Option(hidden=True, help="Ignored; the next release removes it.")] = None,
) -> None:
    """Write an archive for a bug report: machine and versions, configuration, status, recent requests, a record for
    `baton replay`, and logs, without prompts, answers or secrets. Works also when nothing runs, and says what is
    missing and why.
    """
    from baton.cli.bundle.command import make_bundle

    raise typer.Exit(make_bundle(out, admin or (), with_tokens=with_tokens))
