"""What `baton top` shows, as lines: a look at the router as its user wants to see it. And what keys change. Pure."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from baton.cli.status import (
    COLUMNS,
    GAP,
    UNKNOWN,
    Column,
    Frame,
    fitting_table,
    headline,
    latency_line,
    name_of,
    wrapped,
)
from baton.cli.top.keys import Key
from baton.cli.top.look import Look, Rates
from baton.cli.top.waterfall import short_ms, waterfall_lines, way_of
from baton.client import RecentRequest, WorkerStatus
from baton.process.foreign_text import shown

CHOSEN = "> "
ID_CHARACTERS = 12
LEAST_REQUESTS = 3  # lines, however many workers there are
KEYS = ("q quit", "up/down choose", "enter waterfall", "s sort", "p pause")
KEYS_OPEN = ("q quit", "up/down next", "esc back", "p pause")


class Sort(Enum):
    NEWEST = "newest"
    TTFT = "TTFT"
    TOTAL = "total"
    GAP = "longest gap"


class RequestKey(NamedTuple):
    """Clients may give one id, or one trace, to several requests."""

    trace_id: str
    request_id: str


@dataclass(frozen=True, slots=True)
class View:
    """What is chosen. `is_open`: the chosen request is shown alone."""

    sort: Sort = Sort.NEWEST
    chosen: RequestKey | None = None
    is_open: bool = False
    is_paused: bool = False

    @property
    def opened_id(self) -> str:
        """As the router's admin port takes it; empty where none is open."""
        if not self.is_open or self.chosen is None:
            return ""
        return self.chosen.request_id or self.chosen.trace_id


class Screen(NamedTuple):
    lines: list[str]
    chosen: int | None  # the line of the chosen request


def _screen(lines: Iterable[str], chosen: int | None) -> Screen:
    """Screen of these lines, with control characters in foreign names escaped."""
    return Screen(list(map(shown, lines)), chosen)


def key_of(request: RecentRequest) -> RequestKey:
    return RequestKey(request.trace_id, request.request_id)


_MEASURES: dict[Sort, Callable[[RecentRequest], float]] = {
    Sort.TTFT: lambda request: request.stages.ttft_ms,
    Sort.TOTAL: lambda request: request.stages.total_ms,
    Sort.GAP: lambda request: request.tbt.max_ms if request.tbt is not None else 0.0,
}


def ordered(requests: Sequence[RecentRequest], sort: Sort) -> list[RecentRequest]:
    """The largest first; the newest as the router orders them."""
    measure = _MEASURES.get(sort)
    return list(requests) if measure is None else sorted(requests, key=measure, reverse=True)


def pressed(view: View, key: Key, requests: Sequence[RecentRequest]) -> View:
    """The view after a key other than QUIT."""
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
    """The first where none was chosen, or the chosen one is no longer among them."""
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
    """The column of that name of `baton status`."""
    column = next(each for each in COLUMNS if each.header == header)
    return Column(header, lambda row: column.cell(row.worker), is_number=column.is_number)


def _tbt(quantile: str) -> Callable[[_Row], str]:
    return lambda row: short_ms(getattr(row.worker.tbt, quantile)) if row.worker.tbt is not None else UNKNOWN


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


def _request_id(request: RecentRequest) -> str:
    given = request.request_id.removeprefix("req-") or UNKNOWN
    return given if len(given) <= ID_CHARACTERS else given[: ID_CHARACTERS - 1] + "~"


def _stalls(request: RecentRequest) -> str:
    """While it runs they are counted only where it is looked at closely."""
    return str(request.stall_count) if request.tbt is not None and request.phase != "decode" else UNKNOWN


def _worst(request: RecentRequest) -> str:
    stall = max(request.stalls, key=lambda each: each.gap_ms, default=None)
    if stall is None:
        return UNKNOWN
    cause = f": {stall.causes[0].cause.replace('_', ' ')}" if stall.causes else ""
    return short_ms(stall.gap_ms) + cause


def _tbt_of(quantile: str) -> Callable[[RecentRequest], str]:
    return lambda request: short_ms(getattr(request.tbt, quantile)) if request.tbt is not None else UNKNOWN


_REQUEST_COLUMNS: tuple[Column[RecentRequest], ...] = (
    Column("request", _request_id, is_number=False),
    Column("phase", lambda request: request.phase, is_number=False),
    Column("prompt", lambda request: str(request.prompt_tokens), rank=1),
    Column("out", lambda request: str(request.generated_tokens), rank=1),
    Column("TTFT", lambda request: short_ms(request.stages.ttft_ms) if request.stages.ttft_ms else UNKNOWN, rank=1),
    Column("TBT p50", _tbt_of("p50_ms"), rank=3),
    Column("TBT p99", _tbt_of("p99_ms"), rank=1),
    Column("total", lambda request: short_ms(request.stages.total_ms)),
    Column("stalls", _stalls, rank=1),
    Column("longest stall", _worst, rank=2, is_number=False),
    Column("workers", way_of, rank=3, is_number=False),
)


def screen_of(frame: Frame[Look], view: View, width: int, height: int | None, has_keys: bool = True) -> Screen:
    """`height` None: as many lines as there are. Without keys nothing says that there are some."""
    look, top = frame.content, list(wrapped([frame.notice], width)) if frame.notice else []
    if look is None:
        return _screen(top, None)
    top += [] if frame.is_current else ["The last figures:"]
    bottom = ["", *_footer(view, width)] if has_keys else []
    opened = _opened(look, view)
    if opened is not None:
        room = None if height is None else max(0, height - len(top) - len(bottom))
        return _screen([*top, *waterfall_lines(opened, width)[:room], *bottom], None)
    top += [*wrapped(_headlines(look, view), width), ""]
    room = None if height is None else max(0, height - len(top) - len(bottom))
    workers = _workers(look, width, None if room is None else max(1, room - LEAST_REQUESTS - 2))
    room = None if room is None else max(1, room - len(workers) - 1)
    requests, chosen = _requests(look, view, width, room)
    lines = [*top, *workers, "", *requests, *bottom]
    return _screen(lines, None if chosen is None else len(top) + len(workers) + 1 + chosen)


def _opened(look: Look, view: View) -> RecentRequest | None:
    """With its stalls where they have come."""
    if not view.is_open:
        return None
    known = (*([look.opened] if look.opened is not None else []), *look.requests)
    return next((request for request in known if key_of(request) == view.chosen), None)


def _headlines(look: Look, view: View) -> list[str]:
    paused = " · paused" if view.is_paused else ""
    return [headline(look.status) + paused, latency_line(look.status), rates_line(look.rates)]


def rates_line(rates: Rates) -> str:
    shown = (UNKNOWN if each is None else f"{each:,.0f}" for each in (rates.prompt_tokens, rates.generated_tokens))
    return "tokens per second: {} of prompts, {} of answers".format(*shown)


def _workers(look: Look, width: int, room: int | None) -> list[str]:
    rows = [_Row(worker, look.rates.steps.get(worker.endpoint)) for worker in look.status.workers]
    lines = fitting_table(_WORKER_COLUMNS, rows, width)
    if lines is None:  # a long name: above its row, as `baton status` has it
        header, *others = fitting_table(_WORKER_COLUMNS[1:], rows, 10 * width) or [""]
        named = zip(rows, others, strict=True)
        lines = [GAP + header, *(line for row, other in named for line in (name_of(row.worker), GAP + other))]
    if room is not None and len(lines) > room:
        return [*lines[: room - 1], f"... {len(lines) - room + 1} lines more: `baton status`"]
    return lines


def _requests(look: Look, view: View, width: int, room: int | None) -> tuple[list[str], int | None]:
    """The table with the chosen one in it, and the line of that."""
    requests = ordered(look.requests, view.sort)
    if not requests:
        return ["No request yet."], None
    keys = [key_of(request) for request in requests]
    chosen = keys.index(view.chosen) if view.chosen in keys else None
    shown = len(requests) if room is None else max(1, room - 1)
    first = max(0, chosen - shown + 1) if chosen is not None else 0
    table = fitting_table(_REQUEST_COLUMNS, requests, width - len(CHOSEN)) or [_request_id(each) for each in requests]
    header, rows = table[0], table[1:]
    lines = [
        (CHOSEN if at == chosen else " " * len(CHOSEN)) + row
        for at, row in enumerate(rows[first : first + shown], first)
    ]
    return [" " * len(CHOSEN) + header, *lines], None if chosen is None else chosen - first + 1


def _footer(view: View, width: int) -> Iterator[str]:
    keys = KEYS_OPEN if view.is_open else KEYS
    named = [f"{each}: {view.sort.value}" if each == "s sort" else each for each in keys]
    return wrapped([" · ".join(named)], width)
