"""`baton status`, `health`, `explain`, `role` and `trace`: their flags."""

from typing import Annotated, Literal

import typer

from baton.cli import options
from baton.cli.options import DEFAULT_TARGET


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
    request_id: Annotated[
        str, typer.Argument(help="The request's id, as an answer has it (chatcmpl-... too), or its trace's id.")
    ],
    json: options.Json = False,
    target: options.Target = DEFAULT_TARGET,
    admin: Annotated[
        list[str] | None,
        typer.Option(help="Admin port of a router; several may be given. Default: the port after that of --target."),
    ] = None,
) -> None:
    """Why one of the last 1,024 requests of a router went where it went: every worker with what was weighed, what was
    expected, and what happened.
    """
    from baton.cli.explain import show_explanation

    raise typer.Exit(show_explanation(request_id, admin or options.admin_target_of(target).split(","), json))


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
    """Where the time of the last requests went, from the trace file."""
    from baton.cli.trace import show_traces

    raise typer.Exit(show_traces(file, last, json))
