"""`baton role`: has a worker change between prefill and decode, and waits until it serves as that."""

import time

from cli.errors import CommandFailed
from cli.failures import for_people
from client import AdminClient, BatonClientError, RetryPolicy, WorkerStatus
from client.cluster import Role

POLL_S = 0.1


def change_role(admin_target: str, worker_id: str, role: Role, timeout_s: float) -> int:
    """Exit code 0 when it serves so. Raises: CommandFailed."""
    began_s = time.monotonic()
    try:
        with AdminClient(admin_target, retry=RetryPolicy(attempts=1)) as admin:
            before = _find(admin, worker_id)
            if before is not None and before.role == role and _serves(before):
                print(f"{worker_id} is a {role} worker already")
                return 0
            admin.change_role(worker_id, role)
            print(f"{worker_id} drains to become {role}", flush=True)
            while time.monotonic() - began_s < timeout_s:
                now = _find(admin, worker_id)
                if now is not None and now.role == role and _serves(now):
                    print(f"{worker_id} serves as {role} after {time.monotonic() - began_s:.1f} s")
                    return 0
                time.sleep(POLL_S)
    except BatonClientError as error:
        raise CommandFailed(for_people(error, f"{admin_target} (admin port)").message) from error
    raise CommandFailed(f"{worker_id} does not serve as {role} after {timeout_s:g} s; see `baton status`")


def _find(admin: AdminClient, worker_id: str) -> WorkerStatus | None:
    return next((each for each in admin.status().workers if each.worker_id == worker_id), None)


def _serves(worker: WorkerStatus) -> bool:
    return worker.connected and worker.load is not None and not worker.load.draining
