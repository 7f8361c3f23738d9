"""Waterfall of one request: a bar per stage, marks for stalls, and their causes."""

from collections.abc import Iterator
from typing import NamedTuple

from baton.cli.layout import ms, wrapped
from baton.cli.why.sentences import drafts
from baton.cli.why.words import stall_lines
from baton.client import RecentRequest, RequestStages

TO_FIRST_TOKEN = ("router_queue_ms", "route_ms", "prefill_fetch_ms", "prefill_queue_ms", "prefill_ms", "return_ms")
TO_SECOND_TOKEN = ("recovery_ms", "transfer_exposed_ms", "decode_admission_ms", "first_step_ms")
LATER_TOKENS, UNFINISHED = "later tokens", "unfinished"
MARK = "!"
_NAME, _TIME = 17, 9  # column widths in characters


class Bar(NamedTuple):
    """Bar of a stage, in milliseconds since the request's arrival."""

    name: str
    begin_ms: float
    length_ms: float


def bars(stages: RequestStages) -> Iterator[Bar]:
    """Yield the stages one after another, without those that took no time."""
    begin_ms = 0.0
    for names, next_ms in ((TO_FIRST_TOKEN, stages.ttft_ms), (TO_SECOND_TOKEN, 0.0)):
        for name in names:
            length_ms: float = getattr(stages, name)
            if length_ms > 0.0:
                yield Bar(name.removesuffix("_ms").replace("_", " "), begin_ms, length_ms)
                begin_ms += length_ms
        begin_ms = next_ms or begin_ms
    if stages.total_ms > begin_ms:
        yield Bar(LATER_TOKENS if stages.ttft_ms else UNFINISHED, begin_ms, stages.total_ms - begin_ms)


def waterfall_lines(request: RecentRequest, width: int) -> list[str]:
    """Return the request's figures, its bars, and its stalls."""
    drawn = list(bars(request.stages))
    columns = max(4, width - _NAME - _TIME - 4)
    return [
        *wrapped([*_heading(request)], width, break_ids=True),
        "",
        *(_row(each, request, columns) for each in drawn),
        *_stall_lines(request, width),
    ]


def _heading(request: RecentRequest) -> Iterator[str]:
    end = f"{request.phase}: {request.reason.replace('_', ' ')}" if request.reason else request.phase
    ids = [request.request_id] if request.request_id else []
    yield " · ".join((*ids, *([request.model] if request.model else []), end, f"trace {request.trace_id}"))
    cached = f" ({request.cached_tokens} cached)" if request.cached_tokens else ""
    attempts = [f"{request.attempts} attempts"] if request.attempts > 1 else []
    tokens = f"{request.prompt_tokens} prompt tokens{cached}, {request.generated_tokens} generated"
    yield " · ".join((path_of(request), tokens, *attempts))
    if request.drafts is not None:
        yield drafts(request.drafts)
    times = [f"TTFT {ms(request.stages.ttft_ms)}" if request.stages.ttft_ms else "no token yet"]
    if request.tbt is not None:
        tbt = request.tbt
        times.append(f"TBT p50 {ms(tbt.p50_ms)}, p99 {ms(tbt.p99_ms)}, longest {ms(tbt.max_ms)}")
    yield " · ".join((*times, f"{ms(request.stages.total_ms)} in all"))


def path_of(request: RecentRequest) -> str:
    """Format the workers of a request, `prefill > decode`."""
    if not request.decode:
        return "no worker"
    return f"{request.prefill} > {request.decode}" if request.prefill else request.decode


def _row(each: Bar, request: RecentRequest, columns: int) -> str:
    total_ms = request.stages.total_ms
    line = bar(each.begin_ms, each.length_ms, total_ms, columns)
    if each.name == LATER_TOKENS:
        for stall in request.stalls:
            line = _marked(line, bar(stall.at_ms - stall.gap_ms, stall.gap_ms, total_ms, columns, MARK))
    return f"{each.name:<{_NAME}} {ms(each.length_ms):>{_TIME}} |{line}|"


def _marked(line: str, marks: str) -> str:
    return "".join(mark if mark == MARK else drawn for drawn, mark in zip(line, marks, strict=True))


def _stall_lines(request: RecentRequest, width: int) -> Iterator[str]:
    if not request.stalls:
        return
    many = f"the longest {len(request.stalls)} of " if request.stall_count > len(request.stalls) else ""
    yield ""
    yield f"stalls ({many}{request.stall_count}), marked {MARK}:"
    yield from stall_lines(sorted(request.stalls, key=lambda each: -each.gap_ms), request.request_id, width)


def bar(begin: float, length: float, total: float, columns: int, mark: str = "#") -> str:
    """Draw a stage on a scale of the complete request, with at least one mark. All times have the same unit."""
    total = max(total, 1e-9)
    first = min(columns - 1, max(0, int(begin * columns // total)))
    marks = max(1, min(columns - first, round(length * columns / total)))
    return (" " * first + mark * marks).ljust(columns)
