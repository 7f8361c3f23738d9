"""Lines of `baton top` for a view of a snapshot, and how keys change the view. Pure."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from baton.cli.layout import UNKNOWN, Column, fitting_table, ms, table, wrapped
from baton.cli.status import COLUMNS, WatchFrame, headline, latency_line, name_of, names_above
from baton.cli.top.keys import Key
from baton.cli.top.snapshot import Rates, Snapshot
from baton.cli.why import recent
from baton.cli.why.waterfall import waterfall_lines
from baton.client import RecentRequest, WorkerStatus
from baton.process.foreign_text import shown

CHOSEN = "> "
MIN_REQUEST_LINES = 3  # lines kept for requests if there are many workers
KEYS = ("q quit", "up/down choose", "enter waterfall", "s sort", "p pause")
KEYS_OPEN = ("q quit", "up/down next", "esc back", "p pause")


class Sort(Enum):
    NEWEST = "newest"
    TTFT = "TTFT"
    TOTAL = "total"
    GAP = "longest gap"


class RequestKey(NamedTuple):
    """Identity of a request. Both ids are needed, since clients may reuse either."""

    trace_id: str
    request_id: str


@dataclass(frozen=True, slots=True)
class View:
    """Selection that the user has made with keys. `is_open`: the chosen request is shown alone."""

    sort: Sort = Sort.NEWEST
    chosen: RequestKey | None = None
    is_open: bool = False
    is_paused: bool = False

    @property
    def opened_id(self) -> str:
        """Return the id for fetching the open request from the admin port; empty if no request is open."""
        if not self.is_open or self.chosen is None:
            return ""
        return self.chosen.request_id or self.chosen.trace_id


class Screen(NamedTuple):
    lines: list[str]
    chosen: int | None  # index of the chosen request's line


def _screen(lines: Iterable[str], chosen: int | None) -> Screen:
    """Return a screen with escaped control characters, which names from clients may contain."""
    return Screen(list(map(shown, lines)), chosen)


def key_of(request: RecentRequest) -> RequestKey:
    return RequestKey(request.trace_id, request.request_id)


_MEASURES: dict[Sort, Callable[[RecentRequest], float]] = {
    Sort.TTFT: lambda request: request.stages.ttft_ms,
    Sort.TOTAL: lambda request: request.stages.total_ms,
    Sort.GAP: lambda request: request.tbt.max_ms if request.tbt is not None else 0.0,
}


def ordered(requests: Sequence[RecentRequest], sort: Sort) -> list[RecentRequest]:
    """Return the requests in descending order of the measure of `sort`; the newest first if `sort` has no measure."""
    measure = _MEASURES.get(sort)
    return list(requests) if measure is None else sorted(requests, key=measure, reverse=True)


def pressed(view: View, key: Key, requests: Sequence[RecentRequest]) -> View:
    """Return the view after a key other than QUIT."""
    match key:
        case Key.UP | Key.DOWN:
            return replace(view, chosen=_neighbour(view, ordered(requests, view.sort), 1 if key is Key.DOWN else -1))
        case Key.ENTER:
            chosen = view.chosen or _neighbour(view, ordered(requests, view.sort), 1)
            return replace(view, chosen=chosen, is_open=not view.is_open and chosen is not None)
        case Key.BACK:
            return replace(view, is_open=False)
        case Key.SORT:
            sorts = list(Sort)
            return replace(view, sort=sorts[(sorts.index(view.sort) + 1) % len(sorts)])
        case Key.PAUSE:
            return replace(view, is_paused=not view.is_paused)
        case _:
            return view


def _neighbour(view: View, requests: Sequence[RecentRequest], step: int) -> RequestKey | None:
    """Return the request `step` lines below the chosen one; the first one if there is no chosen one."""
    keys = [key_of(request) for request in requests]
    if not keys:
        return view.chosen
    at = keys.index(view.chosen) + step if view.chosen in keys else 0
    return keys[min(max(at, 0), len(keys) - 1)]


@dataclass(frozen=True, slots=True)
class _Row:
    worker: WorkerStatus
    steps_per_s: float | None


def _as_status(header: str) -> Column[_Row]:
    """Return the column of `baton status` with this header."""
    column = next(each for each in COLUMNS if each.header == header)
    return Column(header, lambda row: column.cell(row.worker), is_number=column.is_number)


def _tbt(quantile: str) -> Callable[[_Row], str]:
    return lambda row: ms(getattr(row.worker.tbt, quantile)) if row.worker.tbt is not None else UNKNOWN


_WORKER_COLUMNS = (
    *(_as_status(header) for header in ("worker", "running", "blocks")),
    replace(_as_status("pending"), rank=1),
    Column("steps/s", lambda row: UNKNOWN if row.steps_per_s is None else f"{row.steps_per_s:,.0f}"),
    Column("TBT p50", _tbt("p50_ms"), rank=1),
    Column("TBT p99", _tbt("p99_ms"), rank=1),
    replace(_as_status("state"), rank=2),
    replace(_as_status("pending tokens"), rank=2),
    replace(_as_status("hit rate"), rank=2),
)


def screen_of(frame: WatchFrame[Snapshot], view: View, width: int, height: int | None, has_keys: bool = True) -> Screen:
    """Return the screen. `height`: number of lines, None for no limit. `has_keys`: list the keys."""
    snapshot, top = frame.content, list(wrapped([frame.notice], width)) if frame.notice else []
    if snapshot is None:
        return _screen(top, None)
    top += [] if frame.is_current else ["The last figures:"]
    bottom = ["", *_footer(view, width)] if has_keys else []
    opened = _opened(snapshot, view)
    if opened is not None:
        room = None if height is None else max(0, height - len(top) - len(bottom))
        return _screen([*top, *waterfall_lines(opened, width)[:room], *bottom], None)
    top += [*wrapped(_headlines(snapshot, view), width), ""]
    room = None if height is None else max(0, height - len(top) - len(bottom))
    workers = _workers(snapshot, width, None if room is None else max(1, room - MIN_REQUEST_LINES - 2))
    room = None if room is None else max(1, room - len(workers) - 1)
    requests, chosen = _requests(snapshot, view, width, room)
    lines = [*top, *workers, "", *requests, *bottom]
    return _screen(lines, None if chosen is None else len(top) + len(workers) + 1 + chosen)


def _opened(snapshot: Snapshot, view: View) -> RecentRequest | None:
    """Return the open request, with its stalls once they have arrived."""
    if not view.is_open:
        return None
    known = (*([snapshot.opened] if snapshot.opened is not None else []), *snapshot.requests)
    return next((request for request in known if key_of(request) == view.chosen), None)


def _headlines(snapshot: Snapshot, view: View) -> list[str]:
    paused = " · paused" if view.is_paused else ""
    return [headline(snapshot.status) + paused, latency_line(snapshot.status), rates_line(snapshot.rates)]


def rates_line(rates: Rates) -> str:
    """Format token rates."""
    shown = (UNKNOWN if each is None else f"{each:,.0f}" for each in (rates.prompt_tokens, rates.generated_tokens))
    return "tokens per second: {} prompt, {} generated".format(*shown)


def _workers(snapshot: Snapshot, width: int, room: int | None) -> list[str]:
    rows = [_Row(worker, snapshot.rates.steps.get(worker.endpoint)) for worker in snapshot.status.workers]
    lines = fitting_table(_WORKER_COLUMNS, rows, width)
    if lines is None:
        lines = names_above(_WORKER_COLUMNS[1:], rows, [name_of(row.worker) for row in rows])
    if room is not None and len(lines) > room:
        return [*lines[: room - 1], f"... {len(lines) - room + 1} more lines: `baton status`"]
    return lines


def _requests(snapshot: Snapshot, view: View, width: int, room: int | None) -> tuple[list[str], int | None]:
    """Return the table of requests, and the index of the chosen request's line."""
    requests = ordered(snapshot.requests, view.sort)
    if not requests:
        return ["No request yet."], None
    keys = [key_of(request) for request in requests]
    chosen = keys.index(view.chosen) if view.chosen in keys else None
    shown = len(requests) if room is None else max(1, room - 1)
    first = max(0, chosen - shown + 1) if chosen is not None else 0
    lines = fitting_table(recent.COLUMNS, requests, width - len(CHOSEN)) or table(recent.COLUMNS[:1], requests)
    header, *rows = lines
    marked = [
        (CHOSEN if at == chosen else " " * len(CHOSEN)) + row
        for at, row in enumerate(rows[first : first + shown], first)
    ]
    return [" " * len(CHOSEN) + header, *marked], None if chosen is None else chosen - first + 1


def _footer(view: View, width: int) -> Iterator[str]:
    keys = KEYS_OPEN if view.is_open else KEYS
    named = [f"{each}: {view.sort.value}" if each == "s sort" else each for each in keys]
    return wrapped([" · ".join(named)], width)
