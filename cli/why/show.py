"""`baton why`: asks the routers and prints."""

import json
from dataclasses import asdict

from baton.cli.connection import first_that_knows
from baton.cli.why.tables import lines
from baton.service.foreign_text import shown


def show_why(request_id: str, admin_targets: list[str], as_json: bool) -> int:
    """Raises: CommandFailed."""
    found = first_that_knows(request_id, admin_targets, lambda admin: admin.why(request_id))
    print(json.dumps(asdict(found)) if as_json else "\n".join(map(shown, lines(found))))
    return 0
