"""Workers, KV blocks, load and latency of one router, once or with --watch (`baton status`)."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Generic, TypeVar

from rich.console import Console
from rich.live import Live
from rich.text import Text

from baton.cli.connection import admin_client, for_people, open_admin
from baton.cli.layout import GAP, UNKNOWN, Column, fitting_table, ms, table, wrapped
from baton.client import BatonClientError, CacheView, ClusterStatus, EndedRequests, Load, RouterStatus, WorkerStatus
from baton.process.foreign_text import shown
from baton.versions import UNANNOUNCED_RELEASE

Row = TypeVar("Row")
Content = TypeVar("Content")


def _of_load(read: Callable[[Load], object]) -> Callable[[WorkerStatus], str]:
    """Return a function that formats a worker's load in a table cell: UNKNOWN if the worker is lost or silent."""

    def cell(worker: WorkerStatus) -> str:
        return UNKNOWN if worker.load is None or not worker.connected else str(read(worker.load))

    return cell


def name_of(worker: WorkerStatus) -> str:
    """Return a worker's id, followed by its role unless the id begins with it."""
    return worker.worker_id if worker.worker_id.startswith(worker.role) else f"{worker.worker_id} ({worker.role})"


def _state(worker: WorkerStatus) -> str:
    if worker.refused:
        return "refused"
    if not worker.connected:
        return "lost"
    return "draining" if worker.load is not None and worker.load.draining else "connected"


def _hit_rate(load: Load) -> str:
    return f"{load.cache_hit_tokens / load.cache_query_tokens:.0%}" if load.cache_query_tokens else UNKNOWN


COLUMNS: tuple[Column[WorkerStatus], ...] = (
    Column("worker", name_of, is_number=False),
    Column("state", _state, is_number=False),
    Column("restarts", lambda worker: str(worker.deaths)),
    Column("running", _of_load(lambda load: load.running_sequences)),
    Column("pending", _of_load(lambda load: load.waiting_requests)),
    Column("pending tokens", _of_load(lambda load: load.pending_tokens), rank=2),
    Column("blocks", _of_load(lambda load: f"{load.pages.held}/{load.pages.total}")),
    Column("pinned", _of_load(lambda load: load.pages.held_by_transfers), rank=3),
    Column("cached", _of_load(lambda load: load.pages.cached), rank=1),
    Column("hit rate", _of_load(_hit_rate), rank=1),
    Column("preempted", _of_load(lambda load: load.preemptions), rank=2),
    Column("pid", lambda worker: str(worker.pid), rank=3),
    Column("endpoint", lambda worker: worker.endpoint, rank=3, is_number=False),
)
"""Columns of the table; STATUS_COLUMNS in options.py describes them."""


def status_lines(status: ClusterStatus, width: int) -> list[str]:
    """Return the complete status. Only a table with very long numbers may be wider than `width`."""
    details = (
        *refusal_lines(status),
        *tool_lines(status),
        *release_lines(status),
        *departure_lines(status),
        *arithmetic_lines(status),
        *link_lines(status),
        *cache_lines(status),
        *tier_lines(status),
        *cluster_lines(status),
    )
    return [
        *wrapped((headline(status), latency_line(status), requests_line(status)), width),
        "",
        *table_lines(status.workers, width),
        *([""] if details else []),
        *wrapped(details, width),
    ]


def headline(status: ClusterStatus) -> str:
    """Return the first line: readiness, models, and requests in flight."""
    models = sorted({worker.model.name for worker in status.workers if worker.model.name})
    models += [f"version {status.model_version}"] if status.model_version else []
    running = status.active_requests - status.queued_requests
    state = "not ready" if not status.ready else "degraded" if status.detail else "ready"
    requests = f"{running} requests running, {status.queued_requests} pending"
    return " · ".join((f"{state}: {status.detail}" if status.detail else state, *models, requests))


def latency_line(status: ClusterStatus) -> str:
    latency = status.latency
    if latency is None:
        return "TTFT and TBT: no request completed in the last minute"
    figures = [("TTFT", latency.ttft), *([("TBT", latency.tbt)] if latency.tbt is not None else [])]
    shown = " · ".join(f"{name} p50 {ms(each.p50_ms)}, p99 {ms(each.p99_ms)}" for name, each in figures)
    return f"{shown} · requests in the last minute: {latency.requests}"


def requests_line(status: ClusterStatus) -> str:
    """Return the number of requests by outcome since the router started, with reasons for unanswered ones."""
    totals, by_outcome = status.requests, dict[str, list[EndedRequests]]()
    for each in totals.ended:
        by_outcome.setdefault(each.outcome, []).append(each)
    parts = [f"{totals.started} requests"]
    for outcome, ended in sorted(by_outcome.items()):
        reasons = ", ".join(f"{each.reason} {each.count}" for each in ended if each.reason)
        parts.append(f"{sum(each.count for each in ended)} {outcome}" + (f" ({reasons})" if reasons else ""))
    tokens = f"{totals.prompt_tokens} prompt tokens, {totals.generated_tokens} generated"
    return f"since the router started: {', '.join(parts)}; {tokens}"


def table_lines(workers: Sequence[WorkerStatus], width: int) -> list[str]:
    """Return the table of workers with the columns that fit. If even rank 0 is too wide, names are above the rows."""
    return fitting_table(COLUMNS, workers, width) or names_above(COLUMNS[1:], workers, list(map(name_of, workers)))


def names_above(columns: Sequence[Column[Row]], rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """Return the narrowest table with each row's name above it."""
    header, *lines = table([column for column in columns if column.rank == 0], rows)
    return [GAP + header, *(each for name, line in zip(names, lines, strict=True) for each in (name, GAP + line))]


def refusal_lines(status: ClusterStatus) -> list[str]:
    """List workers that get no requests, with the reason."""
    return [f"{name_of(worker)} is refused: {worker.refused}" for worker in status.workers if worker.refused]


def tool_lines(status: ClusterStatus) -> list[str]:
    """Say that tools are in a generic format, which models understand less well than their own."""
    if status.tool_format != "generic":
        return []
    return ["tools are described in the system prompt, in a generic format: the model's chat template shows none"]


def release_lines(status: ClusterStatus) -> list[str]:
    """List the releases of routers and workers, if they differ."""
    releases: dict[str, list[str]] = {status.release: ["this router"]}
    for router in status.routers:
        releases.setdefault(router.release, []).append(f"router {router.router_id[:8]}")
    for worker in status.workers:
        if worker.connected:
            releases.setdefault(worker.release, []).append(worker.worker_id)
    if len(releases) < 2:
        return []
    groups = (f"{release or UNANNOUNCED_RELEASE}: {', '.join(names)}" for release, names in sorted(releases.items()))
    return [f"releases serve together: {'; '.join(groups)}"]


def departure_lines(status: ClusterStatus) -> list[str]:
    """List the workers that drained, changed their role or lost their link, with counts."""
    lines = []
    for worker in status.workers:
        counts = (
            ("drained", worker.drains),
            ("changed its role", worker.role_changes),
            ("lost its link", worker.lost_sessions),
        )
        seen = [f"{event} {count} time{'s' * (count > 1)}" for event, count in counts if count]
        if seen:
            lines.append(f"{worker.worker_id} {', '.join(seen)}")
    return lines


def arithmetic_lines(status: ClusterStatus) -> list[str]:
    """List groups of workers whose results are bit-identical; nothing if there is only one group."""
    groups: dict[str, list[str]] = {}
    for worker in status.workers:
        if worker.connected and worker.arithmetic:
            groups.setdefault(worker.arithmetic, []).append(worker.worker_id)
    if len(groups) < 2:
        return []
    listed = "; ".join(f"{', '.join(names)}: {arithmetic}" for arithmetic, names in sorted(groups.items()))
    return [f"workers round differently; an answer that moves between them may change at a near tie: {listed}"]


def link_lines(status: ClusterStatus) -> list[str]:
    """List the transport of each KV link between workers, and why no faster one is used."""
    names = {worker.endpoint: worker.worker_id for worker in status.workers}
    return [
        f"{worker.worker_id} reads {names.get(link.endpoint, link.endpoint)} over {link.transport}, "
        f"{link.gb_per_s:.2f} GB/s" + (f" (nothing faster: {link.fallback})" if link.fallback else "")
        for worker in status.workers
        if worker.connected and worker.load is not None
        for link in worker.load.links
    ]


def cache_lines(status: ClusterStatus) -> list[str]:
    """List the router's view of each prefix cache, with the share of prompts whose hits were predicted correctly."""
    lines = []
    for worker in status.workers:
        view = worker.cache_view
        if view is None or not worker.connected:
            continue
        known = f"cache of {worker.worker_id}: {view.blocks} blocks known, {_knowledge(view)}"
        if view.checked_requests:
            share = view.equal_requests / view.checked_requests
            known += f"; hits predicted correctly for {share:.1%} of {view.checked_requests} prompts"
            known += f", {1 - view.drift:.1%} of the last {min(view.checked_requests, 64)}"
        lines.append(known + (f"; {view.resyncs} snapshots requested" if view.resyncs else ""))
    return [f"prefix index: {status.indexed_blocks} distinct blocks", *lines] if lines else []


def tier_lines(status: ClusterStatus) -> list[str]:
    """List the router's view of each worker's KV files, and the workers that share them."""
    views = [(worker, worker.tier_view) for worker in status.workers if worker.connected and worker.tier_view]
    lines = []
    for worker, view in views:
        others = [name_of(each) for each, its in views if its.directory_id == view.directory_id and each is not worker]
        shared = f" shared with {', '.join(others)}" if others else ""
        known = (
            f"files of {worker.worker_id}: {view.folder_blocks} blocks known, {view.directory_blocks} in a directory"
        )
        lines.append(f"{known}{shared}" + ("" if view.follows else "; catching up"))
    return lines


def cluster_lines(status: ClusterStatus) -> list[str]:
    """List other routers and the state of the role planner."""
    planner = status.planner
    lines = [_router_line(router) for router in status.routers]
    if planner is not None:
        lines.append(
            f"role planner ({planner.mode}): prefill at {planner.prefill_pressure:.0%} of its SLO, "
            f"decode at {planner.decode_pressure:.0%}; {planner.verdict}; {planner.changes} changes made"
        )
        desired = {"prefill": planner.desired_prefill_workers, "decode": planner.desired_decode_workers}
        asked = [f"{number} {role}" for role, number in desired.items() if number]
        if asked:
            lines.append(f"desired workers: {', '.join(asked)}")
    return lines


def _router_line(router: RouterStatus) -> str:
    uptime = timedelta(seconds=round(router.uptime_s))
    named = f"router {router.router_id[:8]} at {router.address}, up {uptime}"
    return f"{named}: {router.requests} requests, {router.tokens} tokens on the workers"


def _knowledge(view: CacheView) -> str:
    if not view.follows:
        return "estimated from requests"
    return "exact" if view.exact else "catching up"


def show_status(admin_target: str, as_json: bool) -> int:
    """Print the status; return 0 if the router is ready, 3 if it answers but is not ready. Raises: CommandFailed."""
    with admin_client(admin_target) as admin:
        status = admin.status()
    if as_json:
        print(json.dumps(asdict(status)))
    else:
        console = Console()
        for line in map(shown, status_lines(status, console.width)):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    return 0 if status.ready else 3


PERIOD_S = 1.0
TIMEOUT_S = 2.0
NOTICE_S = 5.0  # display time of the notice that the router answers again


@dataclass(frozen=True, slots=True)
class WatchFrame(Generic[Content]):
    """State of the screen. `content`: newest figures, None before the first. `notice`: a problem, else empty."""

    content: Content | None
    notice: str
    is_current: bool


def watch_status(admin_target: str, as_json: bool) -> int:
    """Print a frame each second, in place at a terminal, until Ctrl-C; return 0."""
    console = Console()
    with open_admin(admin_target, TIMEOUT_S) as admin:
        shown = frames(admin.status, f"{admin_target} (admin port)", time.monotonic, time.sleep)
        try:
            if as_json:
                _show_json(shown)
            elif console.is_terminal:
                with Live(console=console, auto_refresh=False) as live:
                    for frame in shown:
                        live.update(Text("\n".join(frame_lines(frame, console.width))), refresh=True)
            else:
                for frame in shown:
                    print("\n".join(frame_lines(frame, console.width)), end="\n\n", flush=True)
        except KeyboardInterrupt:
            return 0
    return 0


def frames(
    snapshot: Callable[[], Content], target: str, clock: Callable[[], float], sleep: Callable[[float], None]
) -> Iterator[WatchFrame[Content]]:
    """Yield a frame every PERIOD_S seconds without end, also while the router does not answer."""
    content: Content | None = None
    lost_s: float | None = None
    notice, notice_ends_s = "", 0.0
    while True:
        began_s = clock()
        try:
            content = snapshot()
        except BatonClientError as error:
            lost_s = began_s if lost_s is None else lost_s
            message = for_people(error, target).message
            yield WatchFrame(
                content, f"{message} (lost for {clock() - lost_s:.0f} s, asking every second)", is_current=False
            )
        else:
            if lost_s is not None:
                notice, notice_ends_s = f"{target} answers again, after {clock() - lost_s:.0f} s", clock() + NOTICE_S
                lost_s = None
            yield WatchFrame(content, notice if clock() < notice_ends_s else "", is_current=True)
        sleep(max(0.0, began_s + PERIOD_S - clock()))


def frame_lines(frame: WatchFrame[ClusterStatus], width: int) -> list[str]:
    """Return the lines of a frame, with a heading above figures that are out of date."""
    lines = [frame.notice] if frame.notice else []
    if frame.content is not None:
        lines += [] if frame.is_current else ["The last figures:"]
        lines += status_lines(frame.content, width)
    return list(map(shown, lines))


def _show_json(shown: Iterator[WatchFrame[ClusterStatus]]) -> None:
    """Print an object per frame, {"error": ...} while the router does not answer."""
    for frame in shown:
        content = asdict(frame.content) if frame.is_current and frame.content is not None else {"error": frame.notice}
        print(json.dumps(content), flush=True)
