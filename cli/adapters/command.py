"""Load, list and unload LoRA adapters over a router's admin port (`baton adapter`)."""

import json
from dataclasses import asdict
from pathlib import Path

from baton.cli.connection import admin_client
from baton.client import ModelNotFound
from baton.launch import CommandFailed

LOAD_TIMEOUT_S = 90.0  # longer than the router waits for its workers
ANSWER_S = 5.0
STILL_USED = 3


def load_adapter(admin_target: str, name: str, path: str, replace: bool) -> int:
    """Load an adapter, from a path relative to the current folder; return the exit code. Raises: CommandFailed."""
    folder = str(Path(path).expanduser().resolve())
    with admin_client(admin_target) as admin:
        worker_ids = admin.load_adapter(name, folder, replace=replace, timeout_s=LOAD_TIMEOUT_S)
    print(f"{name} is loaded on {', '.join(worker_ids)}")
    return 0


def list_adapters(admin_target: str, as_json: bool) -> int:
    """Print the adapters; return the exit code. Raises: CommandFailed."""
    with admin_client(admin_target) as admin:
        adapters = admin.adapters()
    if as_json:
        print(json.dumps([asdict(each) for each in adapters]))
        return 0
    for each in adapters:
        origin = "from the start" if each.started else each.path or "unloaded, requests still run with it"
        print(f"{each.name}  {each.digest[:16]}  {origin}  on {', '.join(each.worker_ids) or 'no worker'}")
        for worker_id, why in each.missing.items():
            print(f"  not on {worker_id}: {why or 'it is being loaded'}")
    if not adapters:
        print("no adapters")
    return 0


def unload_adapter(admin_target: str, name: str, wait_s: float) -> int:
    """Unload an adapter; return the exit code. Raises: CommandFailed."""
    with admin_client(admin_target) as admin:
        try:
            worker_ids = admin.unload_adapter(name, wait_s=wait_s, timeout_s=wait_s + ANSWER_S)
        except ModelNotFound as error:
            raise CommandFailed(error.message) from error
    if worker_ids:
        print(f"{name} gets no new requests; some still run with it on {', '.join(worker_ids)}")
        return STILL_USED
    print(f"{name} is unloaded")
    return 0
