"""`baton trace`: where the time of the last requests went.

Two sums are checked, each within 2 ms or 3 %:
TTFT             = router queue + route + prefill fetch + prefill queue + prefill chunks + return
token 1 to 2     = exposed part of the transfer + decode admission + first step, and before them, where a worker failed
                   once the first token was out, the recovery
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.cli.ask import round_milliseconds, round_ms
from baton.cli.span_files.places import chosen_collector, collector_of, newest_trace_file, sent_elsewhere
from baton.cli.span_files.read import Span, read_spans
from baton.launch import CommandFailed
from baton.launch.paths import RUNTIME
from baton.process.foreign_text import shown

TTFT_PARTS = ("router_queue_ms", "route_ms", "prefill_fetch_ms", "prefill_queue_ms", "prefill_ms", "return_ms")
GAP_PARTS = ("recovery_ms", "transfer_exposed_ms", "decode_admission_ms", "first_step_ms")
TOLERANCE_MS = 2.0
TOLERANCE_SHARE = 0.03
WATERFALL_COLUMNS = 48
WORKER_PREFIX = "worker."
STALLS = 3  # that are shown of a request
STALL_CAUSES = 4  # that are shown of a stall


@dataclass(frozen=True, slots=True)
class Sum:
    """A measured time and the stages that should add up to it, in milliseconds."""

    measured_ms: float
    parts_ms: Mapping[str, float]

    @property
    def deviation_ms(self) -> float:
        return sum(self.parts_ms.values()) - self.measured_ms

    @property
    def holds(self) -> bool:
        return abs(self.deviation_ms) <= max(TOLERANCE_MS, TOLERANCE_SHARE * self.measured_ms)


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """One request: its root span and the stages below it, in order of time."""

    root: Span
    stages: Sequence[Span]
    on_workers: Sequence[Span] = ()  # each worker's own span, and behind it those below

    @property
    def ttft(self) -> Sum | None:
        """None where no token came."""
        return self._sum("ttft_ms", TTFT_PARTS)

    @property
    def first_gap(self) -> Sum | None:
        """From token 1 to token 2; None where the answer had one token."""
        return self._sum("token_gap_ms", GAP_PARTS)

    @property
    def stalls(self) -> list[Mapping[str, Any]]:
        """Events, in order."""
        return [event for stage in self.stages for event in stage.events if event["name"] == "stall"]

    def milliseconds(self, name: str) -> float | None:
        value = self.root.attributes.get(f"baton.{name}")
        return float(value) if isinstance(value, int | float) else None

    def _sum(self, whole: str, parts: Sequence[str]) -> Sum | None:
        measured_ms = self.milliseconds(whole)
        if not measured_ms:
            return None
        parts_ms = {part: self.milliseconds(part) or 0.0 for part in parts}
        if not parts_ms.get("recovery_ms"):
            parts_ms.pop("recovery_ms", None)  # hardly any request has one
        return Sum(measured_ms, parts_ms)


def requests_in(spans: Iterable[Span]) -> list[RequestTrace]:
    """The requests among the spans, by time of arrival. A root is the router's server span of a generation."""
    spans = list(spans)
    children: dict[tuple[str, str], list[Span]] = {}
    for span in spans:
        if span.parent_span_id is not None:
            children.setdefault((span.trace_id, span.parent_span_id), []).append(span)
    roots = [span for span in spans if span.kind == "server" and "baton.total_ms" in span.attributes]
    return [_request(root, children) for root in sorted(roots, key=lambda span: span.start_ns)]


def _request(root: Span, children: Mapping[tuple[str, str], Sequence[Span]]) -> RequestTrace:
    def below(span: Span) -> list[Span]:
        return sorted(children.get((span.trace_id, span.span_id), ()), key=lambda each: each.start_ns)

    own = [span for span in below(root) if not span.name.startswith(WORKER_PREFIX)]
    of_workers = [span for span in below(root) if span.name.startswith(WORKER_PREFIX)]
    return RequestTrace(root, own, [each for span in of_workers for each in (span, *below(span))])


def report_lines(request: RequestTrace) -> list[str]:
    """The request for a person: the two sums, time between tokens, a waterfall."""
    root, attributes = request.root, request.root.attributes
    tokens = f"{attributes.get('gen_ai.usage.input_tokens', 0)} tokens in"
    tokens += f" ({attributes.get('gen_ai.usage.cache_read.input_tokens', 0)} cached)"
    tokens += f", {attributes.get('gen_ai.usage.output_tokens', 0)} out"
    ended = f", {_ending(attributes)}" if root.is_error else ""
    lines = [
        f"{root.name}  {tokens}, {root.duration_ms:.1f} ms{ended}",
        f"  for `baton explain`: {_ids(root)}",
        _sum_line("TTFT", request.ttft),
        _sum_line("token 1 to 2", request.first_gap),
    ]
    between = [request.milliseconds(f"tbt_{name}_ms") for name in ("p50", "p99", "max")]
    if None not in between:
        p50, p99, longest = between
        lines.append(f"  TBT           p50 {p50:.2f}  p99 {p99:.2f}  max {longest:.2f} ms")
    if "baton.drafted_tokens" in attributes:
        figures = (attributes[f"baton.{name}"] for name in ("drafted_tokens", "accepted_tokens", "drafts_saved_ms"))
        lines.append(f"  drafts        {draft_phrase(*figures)}")
    lines += [_waterfall_line(root, stage) for stage in request.stages]
    if request.on_workers:
        lines += ["  on the workers:", *(_waterfall_line(root, span) for span in request.on_workers)]
    return [*lines, *_stall_lines(request)]


def _stall_lines(request: RequestTrace) -> list[str]:
    """The longest stalls, longest first, each with the causes that explain most of it."""
    stalls = sorted(request.stalls, key=lambda event: -event["attributes"]["baton.gap_ms"])
    if not stalls:
        return []
    count = max((stage.attributes.get("baton.stalls", 0) for stage in request.stages), default=0)
    return [
        f"  stalls (the longest of {max(count, len(stalls))}):",
        *(f"    {_stall(request, each)}" for each in stalls[:STALLS]),
    ]


def _stall(request: RequestTrace, event: Mapping[str, Any]) -> str:
    given = {name.removeprefix("baton."): value for name, value in event["attributes"].items()}
    after_s = (event["time_ns"] - request.root.start_ns) / 1e9
    columns = (given.get(name, ()) for name in ("causes", "cause_ms", "culprits", "details"))
    return stall_sentence(given["gap_ms"], after_s, given.get("usual_ms", 0.0), zip(*columns, strict=False))


def stall_sentence(
    gap_ms: float, after_s: float, usual_ms: float, causes: Iterable[tuple[str, float, str, str]]
) -> str:
    """`after_s`: its end, since the request's arrival. Of each cause: its word, milliseconds, the request to blame, and
    a detail; the last two may be empty.
    """
    parts = [
        f"{cause.replace('_', ' ')} {ms:.0f} ms"
        + (f" by {culprit}" if culprit else "")
        + (f" ({detail})" if detail else "")
        for cause, ms, culprit, detail in causes
    ]
    return f"{gap_ms:.0f} ms after {after_s:.2f} s = " + " + ".join([*parts[:STALL_CAUSES], f"usual {usual_ms:.0f} ms"])


def draft_phrase(drafted_tokens: int, accepted_tokens: int, saved_ms: float) -> str:
    """`saved_ms`: negative where the answer came later than it would have without drafts."""
    time = f"about {abs(saved_ms):.0f} ms {'sooner' if saved_ms >= 0.0 else 'later'}"
    if not drafted_tokens:
        return f"only of other answers, {time}"
    return f"{accepted_tokens} of {drafted_tokens} drafted tokens were drawn, {time}"


def _ids(root: Span) -> str:
    """The request's ids: from its client or from us, where it came that far, and of its trace."""
    request_id = root.attributes.get("gen_ai.response.id")
    return f"trace {root.trace_id}" if request_id is None else f"{request_id}, or its trace {root.trace_id}"


def _ending(attributes: Mapping[str, Any]) -> str:
    """Such as `refused: queue_full`; of older traces the status."""
    if "baton.outcome" not in attributes:
        return f"ended {attributes.get('error.type', 'with an error')}"
    return f"{attributes['baton.outcome']}: {attributes.get('baton.reason', '')}"


def as_object(request: RequestTrace) -> dict[str, object]:
    """The same for a program."""
    return {
        "trace_id": request.root.trace_id,
        "request_id": request.root.attributes.get("gen_ai.response.id"),
        "name": request.root.name,
        "error": request.root.is_error,
        "duration_ms": round_ms(request.root.duration_ms),
        "ttft": _sum_object(request.ttft),
        "token_gap": _sum_object(request.first_gap),
        "drafts": _drafts_object(request.root.attributes),
        "tbt_ms": {name: _rounded(request.milliseconds(f"tbt_{name}_ms")) for name in ("p50", "p99", "max")},
        "attributes": round_milliseconds(request.root.attributes),
        "on_workers": [
            {
                "name": span.name,
                "start_ms": round_ms((span.start_ns - request.root.start_ns) / 1e6),
                "duration_ms": round_ms(span.duration_ms),
                "attributes": round_milliseconds(span.attributes),
            }
            for span in request.on_workers
        ],
        "stages": [
            {
                "name": stage.name,
                "start_ms": round_ms((stage.start_ns - request.root.start_ns) / 1e6),
                "duration_ms": round_ms(stage.duration_ms),
                "attributes": round_milliseconds(stage.attributes),
                "events": [
                    {
                        "name": event["name"],
                        "at_ms": round_ms((event["time_ns"] - request.root.start_ns) / 1e6),
                        "attributes": dict(event["attributes"]),
                    }
                    for event in stage.events
                ],
            }
            for stage in request.stages
        ],
    }


def _drafts_object(attributes: Mapping[str, Any]) -> dict[str, object] | None:
    if "baton.drafted_tokens" not in attributes:
        return None
    return {name: attributes[f"baton.{name}"] for name in ("drafted_tokens", "accepted_tokens", "drafts_saved_ms")}


def _sum_line(name: str, whole: Sum | None) -> str:
    if whole is None:
        return f"  {name:<13} -"
    parts = " + ".join(f"{part.removesuffix('_ms').replace('_', ' ')} {ms:.2f}" for part, ms in whole.parts_ms.items())
    return f"  {name:<13} {whole.measured_ms:.2f} ms = {parts}  ({_verdict(whole)})"


def _verdict(whole: Sum) -> str:
    off_ms = abs(whole.deviation_ms)
    if whole.holds:
        return f"adds up to within {off_ms:.1f} ms"
    return f"{off_ms:.1f} ms unaccounted for" if whole.deviation_ms < 0 else f"{off_ms:.1f} ms of overlap"


def _sum_object(whole: Sum | None) -> dict[str, object] | None:
    if whole is None:
        return None
    return {
        "measured_ms": round_ms(whole.measured_ms),
        "parts_ms": round_milliseconds(whole.parts_ms),
        "deviation_ms": round_ms(whole.deviation_ms),
        "holds": whole.holds,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round_ms(value)


def _waterfall_line(root: Span, stage: Span) -> str:
    drawn = bar(stage.start_ns - root.start_ns, stage.end_ns - stage.start_ns, root.end_ns - root.start_ns)
    name = stage.name.removeprefix(WORKER_PREFIX)
    return f"    {name:<18} {stage.duration_ms:>9.2f} ms |{drawn}|{_note(stage)}"


def bar(begin: float, length: float, whole: float, columns: int = WATERFALL_COLUMNS, mark: str = "#") -> str:
    """As long and as late as a stage, on a scale of the whole request, all in one unit; at least one mark."""
    whole = max(whole, 1e-9)
    first = min(columns - 1, max(0, int(begin * columns // whole)))
    marks = max(1, min(columns - first, round(length * columns / whole)))
    return (" " * first + mark * marks).ljust(columns)


def _note(stage: Span) -> str:
    attributes = stage.attributes
    if stage.name == "prefill.fetch":
        return f" {attributes['baton.fetch.tokens']} tokens, {attributes['baton.fetch.bytes'] / 2**20:.2f} MiB"
    if stage.name == "attempt":
        return _attempt_note(attributes)
    if "baton.elastic_worker" in attributes:
        error_ms = attributes.get("baton.clock.error_ms")
        return f" {attributes['baton.worker']}" + (
            "" if error_ms is None else f", its clock to within {error_ms:.1f} ms"
        )
    if stage.name == "decode" and attributes.get("baton.stalls"):
        return f" {attributes['baton.stalls']} stalls, the longest {attributes['baton.tbt_max_ms']:.0f} ms"
    if stage.name != "kv.transfer":
        return ""
    parts = [f"{attributes.get('baton.transfer.bytes', 0) / 2**20:.2f} MiB by {attributes['baton.transfer.transport']}"]
    if "baton.transfer.gb_per_s" in attributes:
        parts.append(f"{attributes['baton.transfer.gb_per_s']:.2f} GB/s")
    if "baton.transfer.overlapped_share" in attributes:
        parts.append(f"{attributes['baton.transfer.overlapped_share']:.0%} hidden behind prefill")
    return " " + ", ".join(parts)


def _attempt_note(attributes: Mapping[str, Any]) -> str:
    given = {name.removeprefix("baton.attempt."): value for name, value in attributes.items()}
    way = f"{given['prefill']} -> {given['decode']}" if "prefill" in given else given["decode"]
    choice = f", choice {given['choice']}" if "choice" in given else ""
    begins = f", from token {given['first_token'] + 1} on" if given["first_token"] else ""
    waited = f", the client waited {given['stood_still_ms']:.0f} ms for it" if "stood_still_ms" in given else ""
    failed = f"; {given['failed_worker']} failed: {given['failure']}, {given['message']}" if "failure" in given else ""
    return f" {given['number']}: {way}{choice}{begins}{waited}{failed}"


def show_traces(file: str | None, last: int, as_json: bool) -> int:
    """Raises CommandFailed where there is no trace to show."""
    path = Path(file) if file is not None else newest_trace_file(RUNTIME)
    if path is None:
        if (collector := chosen_collector()) is not None:
            raise CommandFailed(f"traces {sent_elsewhere(str(collector))}")
        raise CommandFailed("no traces yet: `baton up` writes them")
    try:
        if (sent_to := collector_of(path)) is not None:
            raise CommandFailed(f"the traces of the last `baton up` {sent_elsewhere(sent_to)}")
        with path.open(encoding="utf-8", errors="replace") as lines:
            spans = read_spans(lines)
    except OSError as error:
        raise CommandFailed(f"no traces in {path}: {error.strerror}; `baton up` writes them there") from error
    requests = requests_in(spans)[-last:]
    if not requests:
        raise CommandFailed(_nothing_in(path, len(spans)))
    for number, request in enumerate(requests):
        if as_json:
            print(json.dumps(as_object(request)))
        else:
            print(*([""] if number else []), *map(shown, report_lines(request)), sep="\n")
    return 0


def _nothing_in(path: Path, spans: int) -> str:
    if spans:
        return f"{path} has {spans} spans, and no root of a finished request among them"
    if path.stat().st_size:
        return f"{path} has no spans: its lines are neither those of `baton up` nor OTLP JSON"
    return f"no finished request in {path} yet; they are written within some seconds"
