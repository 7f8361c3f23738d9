"""`baton status`, `top`, `health`, `explain`, `why`, `timeline`, `role`, `trace` and `bundle`: their flags."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from baton.cli import options
from baton.cli.options import DEFAULT_TARGET

RequestId = Annotated[
    str, typer.Argument(help="The request's id, as an answer has it, or its trace's; a beginning will do.")
]
Admins = Annotated[
    list[str] | None,
    typer.Option(
        "--admin", help="Admin port of a router; several may be given. Default: the port after that of --target."
    ),
]


def status(
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh each second, until Ctrl-C.")] = False,
    json: options.Json = False,
    target: options.Target = DEFAULT_TARGET,
    admin: options.Admin = None,
) -> None:
    """Workers, KV blocks, requests and latency, as one router sees them. Exit code 3: it answers but is not ready.

    A wide terminal shows more columns, --json all figures. TTFT and TBT are of the requests that ended on this router
    in the last minute.
    """
    admin_target = admin or options.admin_target_of(target)
    if watch:
        from baton.cli.status import watch_status

        raise typer.Exit(watch_status(admin_target, json))
    from baton.cli.status import show_status

    raise typer.Exit(show_status(admin_target, json))


def top(
    once: Annotated[
        bool, typer.Option("--once", help="One frame, after a second; also where there is no terminal.")
    ] = False,
    target: options.Target = DEFAULT_TARGET,
    admin: options.Admin = None,
) -> None:
    """Workers and the newest requests of one router, live: Enter shows where the time of a request went, and which
    request held it up.
    """
    from baton.cli.top.watch import show_top

    raise typer.Exit(show_top(admin or options.admin_target_of(target), once))


def health(
    target: options.Target = DEFAULT_TARGET,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for an answer.")] = 2.0,
    tls_ca: options.TlsCa = None,
    internal: Annotated[
        bool, typer.Option("--internal", help="Ask a worker, with the files of BATON_INTERNAL_TLS_CA, _CERT and _KEY.")
    ] = False,
) -> None:
    """Ask a process for its health (grpc.health.v1): exit code 0 if it serves, else 1. For container health checks."""
    import asyncio

    from baton.cli.connection import way_in
    from baton.launch.readiness import Health, check_health

    found = asyncio.run(check_health(target, timeout, way_in(tls_ca, internal)))
    print(found.value)
    raise typer.Exit(0 if found is Health.SERVING else 1)


def explain(
    request_id: RequestId,
    json: options.Json = False,
    target: options.Target = DEFAULT_TARGET,
    admin: Admins = None,
) -> None:
    """Why one of the last 512 requests of a router went where it went: every worker with what was weighed, what was
    expected, and what happened.
    """
    from baton.cli.explain import show_explanation

    raise typer.Exit(show_explanation(request_id, admin or options.admin_target_of(target).split(","), json))


def why(
    request_id: Annotated[
        str | None,
        typer.Argument(help="The request's id, or its trace's; a beginning will do. Default: the slowest of a minute."),
    ] = None,
    json: options.Json = False,
    target: options.Target = DEFAULT_TARGET,
    admin: Admins = None,
) -> None:
    """Where the time of one of the last 512 requests of a router went, in three sentences and tables: its first
    token, its stalls and whose doing they were, what was cached, and the cost of its prompt on the decode worker.
    """
    from baton.cli.why.show import show_why

    raise typer.Exit(show_why(request_id, admin or options.admin_target_of(target).split(","), json))


def timeline(
    request_id: Annotated[
        str | None, typer.Argument(help="A request that has ended lately: its id, or its trace's. Default: see --last.")
    ] = None,
    last: Annotated[str, typer.Option(help="How far back, for example 30s, 500ms or 2m.")] = "30s",
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("timeline.json"),
    target: options.Target = DEFAULT_TARGET,
    admin: options.Admin = None,
) -> None:
    """Write what router and workers did lately, or around one request, as a file that ui.perfetto.dev opens.

    Each worker's steps (answers, prompt tokens, blocks moved), transfers, requests, KV blocks and queue; the router's
    requests with stages and stalls; the client's waiting.
    """
    from baton.cli.timeline.command import write_timeline

    raise typer.Exit(write_timeline(request_id, last, out, admin or options.admin_target_of(target)))


def role(
    worker_id: Annotated[str, typer.Argument(help="As `baton status` names it.")],
    role: Annotated[Literal["prefill", "decode"], typer.Argument(help="The new role.")],
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait until it serves in that role.")] = 90,
    target: options.Target = DEFAULT_TARGET,
    admin: options.Admin = None,
) -> None:
    """Drain a worker and let it serve in another role, with the same weights; no request is dropped."""
    from baton.cli.explain import change_role

    raise typer.Exit(change_role(admin or options.admin_target_of(target), worker_id, role, timeout))


def trace(
    last: Annotated[int, typer.Option("--last", "-n", min=1, help="How many requests, the newest last.")] = 3,
    file: Annotated[str | None, typer.Option(help="Trace file; default: that of the last `baton up`.")] = None,
    json: options.Json = False,
) -> None:
    """Where the time of the last requests went, from a trace file or from a collector's file of OTLP JSON."""
    from baton.cli.trace import show_traces

    raise typer.Exit(show_traces(file, last, json))


def bundle(
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The archive; default: baton-bundle-TIME.tar.gz, here.")
    ] = None,
    admin: Annotated[
        list[str] | None,
        typer.Option(help="Admin port of a router, host:port; may be repeated. Default: those that run here."),
    ] = None,
    http: Annotated[
        list[str] | None,
        typer.Option(help="HTTP port of a router, host:port; may be repeated. Default: those that run here."),
    ] = None,
) -> None:
    """One archive for a bug report: versions, configuration, status, metrics, traces and logs, without prompts, answers
    or secrets. It works also when nothing runs, and says what is missing and why.
    """
    from baton.cli.bundle.parts import make_bundle

    raise typer.Exit(make_bundle(out, admin or (), http or ()))
