"""Output of `baton replay`: checks of placements and steps, and predicted times to first token. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, NamedTuple

from baton.lab.replay.decisions import PlacementCheck, PlacementDifference
from baton.lab.replay.fit import StepFit
from baton.lab.replay.predict import PredictedRequest, WhatIf, simulated_names
from baton.lab.replay.record import IncidentRecord, RecordedRequest
from baton.lab.replay.steps import StepCheck, StepComposition
from baton.lab.report.result import Columns, table
from baton.lab.report.statistics import percentile
from baton.router.placement.decide import NoRoom
from baton.router.types.placement import WorkerView
from baton.router.types.plain import to_plain

SHOWN_REQUESTS = 20  # maximum rows of a table: the requests with the largest error or change


class TtftError(NamedTuple):
    """Errors of predicted TTFTs, relative to the measured ones."""

    median: float
    p90: float


class TtftPair(NamedTuple):
    """Measured and predicted TTFT of a request, and the prediction after the changes of a replay."""

    request: RecordedRequest
    predicted: PredictedRequest
    changed: PredictedRequest | None  # None: nothing was changed, or the request is left out

    @property
    def error(self) -> float:
        return abs(self.predicted.ttft_ms / self.request.ttft_ms - 1.0)

    @property
    def change_ms(self) -> float:
        return 0.0 if self.changed is None else self.changed.ttft_ms - self.predicted.ttft_ms


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """All that a replay found. `changed`: predictions after the changes; empty without changes."""

    record: IncidentRecord
    placements: PlacementCheck
    steps: tuple[StepCheck, ...]
    fits: Mapping[str, StepFit]
    predicted: tuple[PredictedRequest, ...]
    what_if: WhatIf
    changed: tuple[PredictedRequest, ...]

    @property
    def is_equal(self) -> bool:
        return not self.placements.differences and all(each.difference is None for each in self.steps)

    def pairs(self) -> list[TtftPair]:
        """Return the requests with a measured and a predicted TTFT, in the order of their arrival."""
        predicted = {each.request_id: each for each in self.predicted if each.ttft_ms}
        changed = {each.request_id: each for each in self.changed if each.ttft_ms}
        return [
            TtftPair(each, predicted[each.request_id], changed.get(each.request_id))
            for each in self.record.requests
            if each.ttft_ms and each.request_id in predicted
        ]


def prediction_error(pairs: Sequence[TtftPair]) -> TtftError:
    errors = [pair.error for pair in pairs]
    return TtftError(median(errors), percentile(errors, 90))


def as_text(result: ReplayResult) -> str:
    """Return the text that `baton replay` prints."""
    lines = [*_placement_lines(result.placements)]
    for each in result.steps:
        lines += _step_lines(each)
    pairs = result.pairs()
    if pairs:
        lines += _prediction_lines(result, pairs)
        lines += _change_lines(result, pairs) if result.what_if.changes else _error_lines(pairs)
    else:
        lines.append("TTFT: no request has both a measured and a predicted time to first token")
    return "\n".join(lines)


def _placement_lines(check: PlacementCheck) -> Iterator[str]:
    same = check.checked - len(check.differences)
    unchecked = f"; {check.unchecked} cannot be decided again" if check.unchecked else ""
    yield f"placements: {same} of {check.checked} as recorded{unchecked}"
    if check.differences:
        yield from _placement_difference(check.differences[0])


def _placement_difference(difference: PlacementDifference) -> Iterator[str]:
    recorded, again = difference.recorded, difference.again
    yield f"  first difference: request {difference.request_id}"
    if isinstance(again, NoRoom):
        yield f"    recorded: on {recorded.placement.decode}; now: not placed ({again.name})"
    else:
        for name in difference.changed:
            yield f"    {name}: recorded {getattr(recorded.placement, name)}, now {getattr(again, name)}"
    yield f"    request: {to_plain(recorded.request)}"
    yield from _view_lines(recorded.workers or ())


def _view_lines(workers: Sequence[WorkerView]) -> Iterator[str]:
    for view in workers:
        yield f"    {view.endpoint}: {to_plain(view)}"


def _step_lines(check: StepCheck) -> Iterator[str]:
    skipped = f", the first {check.skipped} skipped" if check.skipped else ""
    stopped = f"; then stopped: {check.stopped}" if check.stopped else ""
    yield f"steps of {check.worker}: {check.checked} of {check.steps} as recorded{skipped}{stopped}"
    if check.difference is None:
        return
    step = check.difference.step
    calls = ", ".join(f"{call.kind} {call.request_number}" for call in step.calls) or "none"
    yield f"  first difference: step {step.number}, after the calls: {calls}"
    if check.difference.refused:
        yield f"    refused: {check.difference.refused}"
        return
    yield f"    recorded: {_composition(StepComposition.of_record(step))}"
    yield f"    planned:  {_composition(check.difference.planned)}"


def _composition(composition: StepComposition) -> str:
    answers = ", ".join(map(str, sorted(composition.answers))) or "none"
    prompts = ", ".join(f"{tokens} of {number}" for number, tokens in sorted(composition.prompts.items())) or "none"
    return f"answers of requests {answers}; prompt tokens {prompts}"


def _prediction_lines(result: ReplayResult, pairs: Sequence[TtftPair]) -> Iterator[str]:
    error = prediction_error(pairs)
    for role, fit in result.fits.items():
        yield f"step times of {role} workers: median error {fit.median_error:.1%} over {fit.steps:,} steps"
    measured_ms, predicted_ms = (
        median(pair.request.ttft_ms for pair in pairs),
        median(pair.predicted.ttft_ms for pair in pairs),
    )
    yield (
        f"TTFT of {len(pairs)} requests: measured median {measured_ms:,.0f} ms, predicted {predicted_ms:,.0f} ms; "
        f"error per request: median {error.median:.0%}, p90 {error.p90:.0%}"
    )
    yield from _simulated_placements(pairs, simulated_names(result.record))


def _simulated_placements(pairs: Sequence[TtftPair], names: Mapping[str, str]) -> Iterator[str]:
    """Yield how many simulated placements are as recorded, and the first that differs, with both inputs."""
    differing = [pair for pair in pairs if _recorded_on(pair, names) != _simulated_on(pair)]
    yield f"simulated placements: {len(pairs) - len(differing)} of {len(pairs)} on the recorded workers"
    if differing:
        pair = differing[0]
        where = f"recorded on {_recorded_on(pair, names)}, simulated on {_simulated_on(pair)}"
        yield f"  first difference: request {pair.request.request_id}: {where}"
        yield "    recorded inputs:"
        yield from _view_lines(pair.request.placements[-1].workers or ())
        yield "    simulated inputs:"
        yield from _view_lines(pair.predicted.workers)


def _recorded_on(pair: TtftPair, names: Mapping[str, str]) -> str:
    placement = pair.request.placements[-1].placement
    return _workers(*(names.get(endpoint or "", endpoint or "") for endpoint in (placement.prefill, placement.decode)))


def _simulated_on(pair: TtftPair) -> str:
    return _workers(pair.predicted.prefill, pair.predicted.decode)


def _workers(prefill: str, decode: str) -> str:
    return f"{prefill} and {decode}" if prefill else f"{decode} alone"


_MEASURED: Columns[TtftPair] = {
    "request": lambda pair: pair.request.request_id,
    "prompt": lambda pair: f"{pair.request.prompt_tokens:,}",
    "cached": lambda pair: f"{pair.request.cached_tokens:,}",
    "simulated": lambda pair: f"{pair.predicted.cached_tokens:,}",
    "TTFT ms": lambda pair: f"{pair.request.ttft_ms:,.0f}",
    "predicted": lambda pair: f"{pair.predicted.ttft_ms:,.0f}",
    "error": lambda pair: f"{pair.error:.0%}",
}
_CHANGED: Columns[TtftPair] = {
    "request": lambda pair: pair.request.request_id,
    "TTFT ms": lambda pair: f"{pair.request.ttft_ms:,.0f}",
    "predicted": lambda pair: f"{pair.predicted.ttft_ms:,.0f}",
    "changed": lambda pair: "-" if pair.changed is None else f"{pair.changed.ttft_ms:,.0f}",
    "by": lambda pair: f"{pair.change_ms:+,.0f}",
}


def _error_lines(pairs: Sequence[TtftPair]) -> Iterator[str]:
    yield ""
    yield table(sorted(pairs, key=lambda pair: -pair.error)[:SHOWN_REQUESTS], _MEASURED)


def _change_lines(result: ReplayResult, pairs: Sequence[TtftPair]) -> Iterator[str]:
    kept = [pair for pair in pairs if pair.changed is not None]
    if not kept:
        return
    before_ms = median(pair.predicted.ttft_ms for pair in kept)
    after_ms = median(pair.predicted.ttft_ms + pair.change_ms for pair in kept)
    yield f"{result.what_if}: predicted median TTFT {after_ms:,.0f} ms instead of {before_ms:,.0f} ms"
    yield ""
    yield table(sorted(kept, key=lambda pair: -abs(pair.change_ms))[:SHOWN_REQUESTS], _CHANGED)


def as_json(result: ReplayResult) -> dict[str, Any]:
    """Return the result for `--json`."""
    pairs, check = result.pairs(), result.placements
    return {
        "equal": result.is_equal,
        "placements": {
            "checked": check.checked,
            "unchecked": check.unchecked,
            "differences": [
                {"request_id": each.request_id, "changed": each.changed, "recorded": to_plain(each.recorded.placement)}
                for each in check.differences
            ],
        },
        "steps": [
            {
                **{name: getattr(each, name) for name in ("worker", "steps", "skipped", "checked", "stopped")},
                "first_difference": None if each.difference is None else each.difference.step.number,
            }
            for each in result.steps
        ],
        "step_times": {role: asdict(fit) for role, fit in result.fits.items()},
        "error": prediction_error(pairs)._asdict() if pairs else None,
        "change": str(result.what_if),
        "requests": [
            {
                "request_id": pair.request.request_id,
                "ttft_ms": pair.request.ttft_ms,
                "predicted_ttft_ms": pair.predicted.ttft_ms,
                "changed_ttft_ms": None if pair.changed is None else pair.changed.ttft_ms,
            }
            for pair in pairs
        ],
    }
