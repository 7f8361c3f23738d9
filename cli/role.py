"""Change a worker's role (`baton role`)."""

import time

from baton.cli.connection import admin_client
from baton.client import AdminClient, ModelNotFound, WorkerStatus
from baton.client.cluster import Role
from baton.launch import CommandFailed

POLL_S = 0.1


def change_role(admin_target: str, worker_id: str, role: Role, timeout_s: float) -> int:
    """Return exit code 0 once the worker serves in the role. Raises: CommandFailed."""
    began_s = time.monotonic()
    with admin_client(admin_target) as admin:
        before = _find(admin, worker_id)
        if before is not None and before.role == role and _serves(before):
            print(f"{worker_id} is a {role} worker already")
            return 0
        try:
            admin.change_role(worker_id, role)
        except ModelNotFound as error:
            raise CommandFailed(error.message) from error
        print(f"{worker_id} drains to become {role}", flush=True)
        while time.monotonic() - began_s < timeout_s:
            now = _find(admin, worker_id)
            if now is not None and now.role == role and _serves(now):
                print(f"{worker_id} serves as {role} after {time.monotonic() - began_s:.1f} s")
                return 0
            time.sleep(POLL_S)
    raise CommandFailed(f"{worker_id} does not serve as {role} after {timeout_s:g} s; see `baton status`")


def _find(admin: AdminClient, worker_id: str) -> WorkerStatus | None:
    return next((each for each in admin.status().workers if each.worker_id == worker_id), None)


def _serves(worker: WorkerStatus) -> bool:
    return worker.connected and worker.load is not None and not worker.load.draining
