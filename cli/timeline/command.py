"""Fetch timelines from a router and write the file."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from baton.cli.connection import admin_client, first_that_knows
from baton.cli.timeline.chrome import chrome_trace
from baton.client import AdminClient
from baton.client.timelines import ProcessTimeline
from baton.launch import CommandFailed

CALL_S = 30.0
AROUND_US = 100_000  # margin before and after a request
UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000}
LONGEST_MS = 3_600_000


def milliseconds(text: str) -> int:
    """Parse `30s`, `500ms` or `2m`. Raises: CommandFailed."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m)", text.strip())
    duration_ms = 0 if match is None else round(float(match[1]) * UNITS_MS[match[2]])
    if not 0 < duration_ms <= LONGEST_MS:
        raise CommandFailed(f"--last: {text!r} is not a time of up to an hour, such as 30s, 500ms or 2m")
    return duration_ms


def write_timeline(request_id: str | None, last: str, out: Path, admin_target: str) -> int:
    """Write the file; return the exit code. Raises: CommandFailed."""
    if request_id:
        known = partial(AdminClient.timelines, request_id=request_id, timeout_s=CALL_S)
        timelines = around_request(first_that_knows(request_id, admin_target.split(","), known))
    else:
        with admin_client(admin_target) as admin:
            timelines = list(admin.timelines(last_ms=milliseconds(last), timeout_s=CALL_S))
    text = json.dumps(chrome_trace(timelines), ensure_ascii=False)
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandFailed(f"{out}: {error.strerror}") from error
    for line in summary(timelines, out):
        print(line)
    return 0


def around_request(timelines: Sequence[ProcessTimeline]) -> list[ProcessTimeline]:
    """Return the timelines with only the steps and requests during or near the router's request."""
    requests = [request for timeline in timelines for request in timeline.requests]
    if not requests:
        return list(timelines)
    began_us = min(request.began_us for request in requests) - AROUND_US
    ended_us = max(request.ended_us for request in requests) + AROUND_US
    return [
        replace(
            timeline,
            steps=tuple(step for step in timeline.steps if step.ended_us >= began_us and step.began_us <= ended_us),
            worker_requests=tuple(
                each
                for each in timeline.worker_requests
                if (each.ended_us or ended_us) >= began_us and each.arrived_us <= ended_us
            ),
        )
        for timeline in timelines
    ]


def summary(timelines: Sequence[ProcessTimeline], out: Path) -> list[str]:
    """Return the lines to print: the file, and what it contains of each process."""
    lines = [f"wrote {out}: open it at https://ui.perfetto.dev"]
    for timeline in timelines:
        if timeline.failure:
            lines.append(f"  {timeline.name}: missing, {timeline.failure}")
        elif timeline.role == "router":
            stalls = sum(len(request.stalls) for request in timeline.requests)
            lines.append(f"  {timeline.name}: {len(timeline.requests)} requests, {stalls} stalls")
        else:
            transfers = sum(each.transfer is not None for each in timeline.worker_requests)
            lines.append(
                f"  {timeline.name}: {len(timeline.steps)} steps, {len(timeline.worker_requests)} requests, "
                f"{transfers} transfers, clock within {timeline.error_us / 1e3:.2f} ms"
            )
    return lines
