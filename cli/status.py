"""`baton status`: workers, pages and load, as one router sees them."""

import json
from dataclasses import asdict
from datetime import timedelta

from cli.errors import CommandFailed
from cli.failures import for_people
from client import (
    AdminClient,
    BatonClientError,
    CacheView,
    ClusterStatus,
    EndedRequests,
    Load,
    RetryPolicy,
    RouterStatus,
    WorkerStatus,
)

MIN_COLUMNS = 170


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
        _print_table(status)
    return 0 if status.ready else 3


def _print_table(status: ClusterStatus) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    # A pipe has no width, and cells that are cut say nothing: long lines are for the terminal to wrap.
    console.width = max(console.width, MIN_COLUMNS)
    for line in (headline(status), requests_line(status)):
        console.print(line, highlight=False, markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("worker", "state", "endpoint"):
        table.add_column(column, no_wrap=True)
    for column in ("pid", "requests", "waiting", "running", "to prefill"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("pages", "free", "cached", "computing", "in transfer"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("hit rate", "preempted", "unfilled"):
        table.add_column(column, justify="right", no_wrap=True)
    for worker in status.workers:
        table.add_row(*row(worker))
    console.print(table)
    for line in (*link_lines(status), *cache_lines(status), *cluster_lines(status)):
        console.print(line, highlight=False, markup=False)


def requests_line(status: ClusterStatus) -> str:
    """What requests came to since the router started, and why those that were not answered were not."""
    totals, by_outcome = status.requests, dict[str, list[EndedRequests]]()
    for each in totals.ended:
        by_outcome.setdefault(each.outcome, []).append(each)
    parts = [f"{totals.started} requests since the start"]
    for outcome, ended in sorted(by_outcome.items()):
        reasons = ", ".join(f"{each.reason} {each.count}" for each in ended if each.reason)
        parts.append(f"{sum(each.count for each in ended)} {outcome}" + (f" ({reasons})" if reasons else ""))
    return ", ".join((*parts, f"{totals.prompt_tokens} tokens in, {totals.generated_tokens} out"))


def link_lines(status: ClusterStatus) -> list[str]:
    """How each worker reads KV from others, and why not faster."""
    names = {worker.endpoint: worker.worker_id for worker in status.workers}
    return [
        f"{worker.worker_id} reads {names.get(link.endpoint, link.endpoint)} by {link.transport}, "
        f"{link.gb_per_s:.2f} GB/s" + (f" (the slow way: {link.fallback})" if link.fallback else "")
        for worker in status.workers
        if worker.connected and worker.load is not None
        for link in worker.load.links
    ]


def cache_lines(status: ClusterStatus) -> list[str]:
    """How well the router knows the prefix cache of each worker, and how often it was right about a prompt."""
    lines = []
    for worker in status.workers:
        view = worker.cache_view
        if view is None or not worker.connected:
            continue
        known = f"cache of {worker.worker_id}: {view.blocks} blocks, {_knowledge(view)}"
        if view.checked_requests:
            share = view.equal_requests / view.checked_requests
            known += f", {share:.1%} of {view.checked_requests} prompts as predicted, drift {view.drift:.1%}"
        lines.append(known + (f", {view.resyncs} resyncs" if view.resyncs else ""))
    return [f"index: {status.indexed_blocks} different blocks", *lines] if lines else []


def _knowledge(view: CacheView) -> str:
    if not view.follows:
        return "guessed"
    return "exact" if view.exact else "followed"


def cluster_lines(status: ClusterStatus) -> list[str]:
    """Other routers, and what the planner of roles thinks."""
    planner = status.planner
    lines = [_router_line(router) for router in status.routers]
    if planner is not None:
        lines.append(
            f"planner ({planner.mode}): prefill at {planner.prefill_pressure:.2f} of what the SLOs allow, "
            f"decode at {planner.decode_pressure:.2f}; {planner.verdict}; {planner.changes} changes"
        )
    return lines


def _router_line(router: RouterStatus) -> str:
    uptime = timedelta(seconds=round(router.uptime_s))
    named = f"other router {router.router_id[:8]} at {router.address}, up {uptime}"
    return f"{named}: {router.requests} requests on the workers, {router.tokens} tokens"


def headline(status: ClusterStatus) -> str:
    """One line: ready or what is missing, the model, requests."""
    models = sorted({worker.model.name for worker in status.workers if worker.model.name})
    requests = f"{status.active_requests} requests, {status.queued_requests} of them waiting for room"
    state = "not ready" if not status.ready else "degraded" if status.detail else "ready"
    return " · ".join((f"{state}: {status.detail}" if status.detail else state, *models, requests))


def row(worker: WorkerStatus) -> tuple[str, ...]:
    """Cells of one worker; a dash where nothing is known now.

    Pages: free + cached + computing + in transfer. The hit rate of the prefix cache is in tokens; unfilled are tokens
    that held pages have room for.
    """
    start = (_name(worker), _state(worker), worker.endpoint, str(worker.pid), str(worker.in_flight_requests))
    load = worker.load
    if load is None or not worker.connected:
        return (*start, *("-",) * 11)
    pages = load.pages
    counts = (load.waiting_requests, load.running_sequences, load.pending_tokens, pages.total, pages.free, pages.cached)
    more = (pages.held_by_sequences, pages.held_by_transfers, _hit_rate(load), load.preemptions, load.unfilled_slots)
    return (*start, *map(str, (*counts, *more)))


def _name(worker: WorkerStatus) -> str:
    """With what it is now, where that is not what it was named for."""
    return worker.worker_id if worker.worker_id.startswith(worker.role) else f"{worker.worker_id} ({worker.role})"


def _hit_rate(load: Load) -> str:
    if not load.cache_query_tokens:
        return "-"
    return f"{load.cache_hit_tokens / load.cache_query_tokens:.0%}"


def _state(worker: WorkerStatus) -> str:
    state = "draining" if worker.load is not None and worker.load.draining else "connected"
    state = state if worker.connected else "lost"
    seen = {
        "died": worker.deaths,
        "drained": worker.drains,
        "changed role": worker.role_changes,
        "out of reach": worker.lost_sessions,
    }
    return ", ".join((state, *(f"{what} {times}x" for what, times in seen.items() if times)))
