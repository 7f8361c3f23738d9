"""`baton status`, `health`, `explain`, `role`, `trace` and `version`: their flags."""

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import Annotated, Literal

import typer

from cli import options
from cli.options import DEFAULT_TARGET


def status(
    json: options.Json = False,
    target: options.Target = DEFAULT_TARGET,
    admin: options.Admin = None,
) -> None:
    """Workers, pages and load. Exit code 3 where the router answers but is not ready."""
    from cli.status import show_status

    raise typer.Exit(show_status(admin or options.admin_target_of(target), json))


def health(
    target: options.Target = DEFAULT_TARGET,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for an answer.")] = 2.0,
    tls_ca: options.TlsCa = None,
    internal: Annotated[
        bool, typer.Option("--internal", help="Of a worker with BATON_INTERNAL_TLS_CA, _CERT and _KEY, as these say.")
    ] = False,
) -> None:
    """Whether a process serves (grpc.health.v1): exit code 0 or 1. For health checks of containers."""
    import asyncio

    from cli.connection import way_in
    from cli.readiness import Health, check_health

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
    from cli.explain import show_explanation

    raise typer.Exit(show_explanation(request_id, admin or [options.admin_target_of(target)], json))


def role(
    worker_id: Annotated[str, typer.Argument(help="As `baton status` names it.")],
    role: Annotated[Literal["prefill", "decode"], typer.Argument(help="What it is to be.")],
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait until it serves so.")] = 90,
    target: options.Target = DEFAULT_TARGET,
    admin: options.Admin = None,
) -> None:
    """Have a worker drain and then serve in another role, with the weights it has; no request is dropped."""
    from cli.role import change_role

    raise typer.Exit(change_role(admin or options.admin_target_of(target), worker_id, role, timeout))


def trace(
    last: Annotated[int, typer.Option("--last", "-n", min=1, help="How many requests, the newest last.")] = 3,
    file: Annotated[str | None, typer.Option(help="Trace file; default: that of the last `baton up`.")] = None,
    json: options.Json = False,
) -> None:
    """Where the time of the last requests went, from the trace file."""
    from cli.trace import show_traces

    raise typer.Exit(show_traces(file, last, json))


def version() -> None:
    """The version of Baton and of what it computes with."""
    for package in ("baton-serve", "torch", "transformers", "grpcio"):
        try:
            found = installed_version(package)
        except PackageNotFoundError:
            # A checkout that runs without an installation, or an image that leaves out what it does not need.
            found = "(not installed)"
        print(f"{package} {found}")
