"""Print the report of one request, or a list of the newest (`baton why`)."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from baton.cli.connection import admin_client, first_that_knows
from baton.cli.why.recent import recent_lines, requests_in_file
from baton.cli.why.tables import lines
from baton.cli.why.waterfall import waterfall_lines
from baton.client import RecentRequest
from baton.launch import CommandFailed
from baton.process.foreign_text import shown
from baton.router.trace.report import named

LATELY_S = 60.0
MAX_REQUESTS = 128
COMPLETED = ("answered", "cancelled", "failed")


def show_why(request_id: str | None, admin_targets: list[str], as_json: bool, placed_only: bool = False) -> int:
    """Print one request, by default the slowest of the last minute. `placed_only`: print only its placement, as JSON.

    Raises: CommandFailed.
    """
    request_id = request_id or slowest(admin_targets)
    found = first_that_knows(request_id, admin_targets, lambda admin: admin.why(request_id))
    if as_json:
        print(json.dumps(asdict(found.placed if placed_only else found)))
    else:
        _print(lines(found))
    return 0


def show_recent(last: int, admin_targets: Sequence[str], as_json: bool) -> int:
    """Print a list of the newest requests of each router. Raises: CommandFailed."""
    requests = [each for target in admin_targets for each in _requests_of(target)]
    requests.sort(key=lambda each: each.age_s)
    if not requests and not as_json:
        print("no request yet")
        return 0
    return _print_list(requests[:last], as_json)


def show_file(request_id: str | None, file: Path, last: int, as_json: bool) -> int:
    """Print the newest requests of a file of spans, or the waterfall of one. Raises: CommandFailed."""
    requests = requests_in_file(file)
    if request_id is None:
        return _print_list(requests[:last], as_json)
    found = named(request_id, requests)
    if found is None:
        raise CommandFailed(f"{file} has no request {request_id}; `baton why --recent --file {file}` lists them")
    if as_json:
        print(json.dumps(asdict(found)))
    else:
        _print(waterfall_lines(found, Console().width))
    return 0


def slowest(admin_targets: Sequence[str]) -> str:
    """Return the id of the slowest request that arrived within the last minute and has completed.

    Raises: CommandFailed.
    """
    requests = [each for target in admin_targets for each in _requests_of(target)]
    lately = [each for each in requests if each.phase in COMPLETED and each.request_id and each.age_s <= LATELY_S]
    if not lately:
        raise CommandFailed(
            f"no request completed in the last {LATELY_S:g} s; name one by its id (`baton why --recent` lists them)"
        )
    return max(lately, key=lambda each: each.stages.total_ms).request_id


def _requests_of(target: str) -> tuple[RecentRequest, ...]:
    with admin_client(target) as admin:
        return admin.recent_requests(limit=MAX_REQUESTS)


def _print_list(requests: Sequence[RecentRequest], as_json: bool) -> int:
    if as_json:
        for each in requests:
            print(json.dumps(asdict(each)))
    else:
        _print(recent_lines(requests, Console().width))
    return 0


def _print(text: Iterable[str]) -> None:
    print("\n".join(map(shown, text)))
