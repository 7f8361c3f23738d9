"""`baton status`: workers, blocks, load and latency, as one router sees them."""

import json
from dataclasses import asdict

from rich.console import Console

from cli.errors import CommandFailed
from cli.failures import for_people
from cli.status_table import status_lines
from client import AdminClient, BatonClientError, RetryPolicy


def show_status(admin_target: str, as_json: bool) -> int:
    """Exit code 0 where the router is ready, 3 where it answers but is not. Raises CommandFailed."""
    try:
        with AdminClient(admin_target, retry=RetryPolicy(attempts=1)) as admin:
            status = admin.status()
    except BatonClientError as error:
        raise CommandFailed(for_people(error, f"{admin_target} (admin port)").message) from error
    if as_json:
        print(json.dumps(asdict(status)))
    else:
        console = Console()
        for line in status_lines(status, console.width):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    return 0 if status.ready else 3
