"""Reload the weights of a running service over a router's admin port (`baton reload`)."""

from baton.cli.connection import admin_client
from baton.launch.model_source import HUB_PATTERNS, find_folder

LOAD_TIMEOUT_S = 660.0  # longer than the router waits for its workers


def reload(admin_target: str, model: str, grace_s: float) -> int:
    """Load weights, from a path relative to the current folder; return the exit code. Raises: CommandFailed."""
    folder = str(find_folder(model, HUB_PATTERNS))
    with admin_client(admin_target) as admin:
        version, worker_ids = admin.reload(folder, grace_s=grace_s, timeout_s=LOAD_TIMEOUT_S)
    print(f"version {version} answers new requests, on {', '.join(worker_ids)}")
    return 0
