"""`baton reload` and `baton role`: load other weights into running workers, or change a worker's role."""

from typing import Annotated, Literal

import typer

from baton.cli import options
from baton.cli.options import DEFAULT_TARGET

RELOAD_TIMEOUT_S = 660.0  # longer than the router waits for its workers
POLL_S = 0.1


def reload(
    model: Annotated[
        str,
        typer.Option(help="Checkpoint folder, at the same path on workers, or hub name. Only its weights may differ."),
    ],
    grace_s: Annotated[
        float,
        typer.Option(min=0, max=3600, help="Seconds for requests with the old weights to complete; the others fail."),
    ] = 300,
    target: options.Target = DEFAULT_TARGET,
    admin: options.Admin = None,
) -> None:
    """Load other weights on all workers without a restart. New requests use them once this command returns.

    Running requests complete with their old weights; until then memory has both sets. If one worker refuses, none keeps
    the new weights.
    """
    from baton.cli.connection import admin_client
    from baton.launch.model_source import find_folder

    folder = str(find_folder(model))
    with admin_client(admin or options.admin_target_of(target)) as client:
        version, worker_ids = client.reload(folder, grace_s=grace_s, timeout_s=RELOAD_TIMEOUT_S)
    print(f"version {version} answers new requests, on {', '.join(worker_ids)}")


def role(
    worker_id: Annotated[str, typer.Argument(help="Id of the worker in `baton status`.")],
    role: Annotated[Literal["prefill", "decode"], typer.Argument(help="New role.")],
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait until it serves in the new role.")] = 90,
    target: options.Target = DEFAULT_TARGET,
    admin: options.Admin = None,
) -> None:
    """Drain a worker and let it serve in another role with the same weights. No request is dropped."""
    import time

    from baton.cli.connection import admin_client
    from baton.client import AdminClient, ModelNotFound
    from baton.launch import CommandFailed

    def serves(client: AdminClient) -> bool:
        return any(
            each.worker_id == worker_id and each.role == role and each.connected
            for each in client.status().workers
            if each.load is not None and not each.load.draining
        )

    began_s = time.monotonic()
    try:
        with admin_client(admin or options.admin_target_of(target)) as client:
            if serves(client):
                print(f"{worker_id} is a {role} worker already")
                return
            client.change_role(worker_id, role)
            print(f"{worker_id} drains to become {role}", flush=True)
            while time.monotonic() - began_s < timeout:
                if serves(client):
                    print(f"{worker_id} serves as {role} after {time.monotonic() - began_s:.1f} s")
                    return
                time.sleep(POLL_S)
    except ModelNotFound as error:
        raise CommandFailed(error.message) from error
    raise CommandFailed(f"{worker_id} does not serve as {role} after {timeout:g} s; see `baton status`")
