"""One request as a waterfall: its stages one below another, the stalls of its answer as marks, and their causes."""

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import astuple
from typing import NamedTuple

from baton.cli.status import GAP
from baton.cli.trace import bar, draft_phrase, stall_sentence
from baton.client import RecentRequest, RequestStages, RequestStall

TO_FIRST_TOKEN = ("router_queue_ms", "route_ms", "prefill_fetch_ms", "prefill_queue_ms", "prefill_ms", "return_ms")
TO_SECOND_TOKEN = ("recovery_ms", "transfer_exposed_ms", "decode_admission_ms", "first_step_ms")
LATER_TOKENS, UNFINISHED = "later tokens", "unfinished"
MARK = "!"
_NAME, _TIME = 17, 9  # characters


class Bar(NamedTuple):
    """Milliseconds since the request's arrival."""

    name: str
    begin_ms: float
    length_ms: float


def bars(stages: RequestStages) -> Iterator[Bar]:
    """One after another, as they are summed up; without those that took no time."""
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
    drawn = list(bars(request.stages))
    columns = max(4, width - _NAME - _TIME - 4)
    return [
        *_wrapped(_heading(request), width),
        "",
        *(_row(each, request, columns) for each in drawn),
        *_stall_lines(request, width),
    ]


def _wrapped(texts: Iterable[str], width: int) -> Iterator[str]:
    """Ids that clients choose may be wider than a terminal."""
    for text in texts:
        yield from textwrap.wrap(text, width, subsequent_indent=GAP, break_on_hyphens=False)


def short_ms(value: float) -> str:
    """At most 8 characters up to a day."""
    if value < 10.0:
        return f"{value:.1f} ms"
    return f"{value:,.0f} ms" if value < 10_000.0 else f"{value / 1e3:,.1f} s"


def _heading(request: RecentRequest) -> Iterator[str]:
    end = f"{request.phase}: {request.reason.replace('_', ' ')}" if request.reason else request.phase
    ids = [request.request_id] if request.request_id else []
    yield " · ".join((*ids, *([request.model] if request.model else []), end, f"trace {request.trace_id}"))
    cached = f" ({request.cached_tokens} cached)" if request.cached_tokens else ""
    attempts = [f"{request.attempts} attempts"] if request.attempts > 1 else []
    tokens = f"{request.prompt_tokens} prompt tokens{cached}, {request.generated_tokens} generated"
    drafts = [f"drafts: {draft_phrase(*astuple(request.drafts))}"] if request.drafts is not None else []
    yield " · ".join((way_of(request), tokens, *drafts, *attempts))
    times = [f"TTFT {short_ms(request.stages.ttft_ms)}" if request.stages.ttft_ms else "no token yet"]
    if request.tbt is not None:
        tbt = request.tbt
        times.append(f"TBT p50 {short_ms(tbt.p50_ms)}, p99 {short_ms(tbt.p99_ms)}, longest {short_ms(tbt.max_ms)}")
    yield " · ".join((*times, f"{short_ms(request.stages.total_ms)} in all"))


def way_of(request: RecentRequest) -> str:
    if not request.decode:
        return "no worker"
    return f"{request.prefill} > {request.decode}" if request.prefill else request.decode


def _row(each: Bar, request: RecentRequest, columns: int) -> str:
    whole_ms = request.stages.total_ms
    line = bar(each.begin_ms, each.length_ms, whole_ms, columns)
    if each.name == LATER_TOKENS:
        for stall in request.stalls:
            line = _marked(line, bar(stall.at_ms - stall.gap_ms, stall.gap_ms, whole_ms, columns, MARK))
    return f"{each.name:<{_NAME}} {short_ms(each.length_ms):>{_TIME}} |{line}|"


def _marked(line: str, marks: str) -> str:
    return "".join(mark if mark == MARK else drawn for drawn, mark in zip(line, marks, strict=True))


def _stall_lines(request: RecentRequest, width: int) -> Iterator[str]:
    if not request.stalls:
        return
    many = f"the longest {len(request.stalls)} of " if request.stall_count > len(request.stalls) else ""
    yield ""
    yield f"stalls ({many}{request.stall_count}), marked {MARK}:"
    for stall in sorted(request.stalls, key=lambda each: -each.gap_ms):
        yield from (GAP + line for line in _wrapped([_sentence(stall)], width - len(GAP)))


def _sentence(stall: RequestStall) -> str:
    causes = ((part.cause, part.ms, part.culprit, part.detail) for part in stall.causes)
    return stall_sentence(stall.gap_ms, stall.at_ms / 1e3, stall.usual_ms, causes)
