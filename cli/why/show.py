"""`baton why`: asks the routers and prints."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from baton.cli.connection import admin_client, first_that_knows
from baton.cli.why.tables import lines
from baton.client import RecentRequest
from baton.launch import CommandFailed
from baton.process.foreign_text import shown

LATELY_S = 60.0
NEWEST = 128
ENDED = ("answered", "cancelled", "failed")


def show_why(request_id: str | None, admin_targets: list[str], as_json: bool) -> int:
    """Without an id, of the slowest request of the last minute. Raises: CommandFailed."""
    request_id = request_id or slowest(admin_targets)
    found = first_that_knows(request_id, admin_targets, lambda admin: admin.why(request_id))
    print(json.dumps(asdict(found)) if as_json else "\n".join(map(shown, lines(found))))
    return 0


def slowest(admin_targets: Sequence[str]) -> str:
    """The id of the request that took longest, of those that arrived on these routers lately and have ended.

    Raises: CommandFailed.
    """
    ended: list[RecentRequest] = []
    for target in admin_targets:
        with admin_client(target) as admin:
            ended += [each for each in admin.recent_requests(limit=NEWEST) if each.phase in ENDED and each.request_id]
    lately = [each for each in ended if each.age_s <= LATELY_S]
    if not lately:
        raise CommandFailed(f"no request has ended in the last {LATELY_S:g} s; name one by its id (chat --verbose)")
    return max(lately, key=lambda each: each.stages.total_ms).request_id
