"""`baton why`: asks the routers and prints."""

import json
from dataclasses import asdict

from baton.cli.connection import admin_client
from baton.cli.why.tables import lines
from baton.client import ModelNotFound
from baton.launch.errors import CommandFailed


def show_why(request_id: str, admin_targets: list[str], as_json: bool) -> int:
    """Asks one router after another. Raises: CommandFailed."""
    for target in admin_targets:
        try:
            with admin_client(target) as admin:
                found = admin.why(request_id)
        except ModelNotFound:
            continue
        print(json.dumps(asdict(found)) if as_json else "\n".join(lines(found)))
        return 0
    raise CommandFailed(
        f"no router at {', '.join(admin_targets)} knows {request_id}: it was served by another one, has not ended yet, "
        "or is too long ago"
    )
