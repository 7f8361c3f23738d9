"""Output of `baton replay`: checks of placements, steps and tokens, and predicted times to first token. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, NamedTuple

from baton.lab.replay.decisions import PlacementCheck, PlacementDifference
from baton.lab.replay.engine import EngineCheck
from baton.lab.replay.fit import StepFit
from baton.lab.replay.past import PastPredictions
from baton.lab.replay.predict import PredictedRequest, WhatIf, simulated_names
from baton.lab.replay.record import IncidentRecord, RecordedRequest
from baton.lab.replay.steps import ResultDifference, StepCheck, StepComposition
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
    """Measured and predicted TTFT of a request, and both after the changes of a replay."""

    request: RecordedRequest
    predicted: PredictedRequest
    changed: PredictedRequest | None  # None: nothing was changed, or the request is left out
    true_ms: float = 0.0  # measured TTFT in a run with the changes; 0: unknown

    @property
    def error(self) -> float:
        return abs(self.predicted.ttft_ms / self.request.ttft_ms - 1.0)

    @property
    def changed_error(self) -> float | None:
        """Error of the prediction after the changes; None if the truth is unknown."""
        return None if self.changed is None or not self.true_ms else abs(self.changed.ttft_ms / self.true_ms - 1.0)

    @property
    def change_ms(self) -> float:
        return 0.0 if self.changed is None else self.changed.ttft_ms - self.predicted.ttft_ms


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """All that a replay found.

    `changed`: predictions after the changes; empty without changes. `engine`: None if nothing was computed. `truth`:
    record of a run with the changes; None: there was none. `past`: earlier predictions of changes with their truth.
    """

    record: IncidentRecord
    placements: PlacementCheck
    steps: tuple[StepCheck, ...]
    fits: Mapping[str, StepFit]
    predicted: tuple[PredictedRequest, ...]
    what_if: WhatIf
    changed: tuple[PredictedRequest, ...]
    engine: EngineCheck | None = None
    truth: IncidentRecord | None = None
    past: PastPredictions | None = None

    @property
    def is_equal(self) -> bool:
        computed = () if self.engine is None else self.engine.workers
        return not self.placements.differences and all(each.difference is None for each in (*self.steps, *computed))

    def pairs(self) -> list[TtftPair]:
        """Return the requests with a measured and a predicted TTFT, in the order of their arrival."""
        predicted = {each.request_id: each for each in self.predicted if each.ttft_ms}
        changed = {each.request_id: each for each in self.changed if each.ttft_ms}
        true_ms = {} if self.truth is None else {each.request_id: each.ttft_ms for each in self.truth.requests}
        return [
            TtftPair(each, predicted[each.request_id], changed.get(each.request_id), true_ms.get(each.request_id, 0.0))
            for each in self.record.requests
            if each.ttft_ms and each.request_id in predicted
        ]


def prediction_error(pairs: Sequence[TtftPair]) -> TtftError:
    return _error_of([pair.error for pair in pairs])


def change_error(pairs: Sequence[TtftPair]) -> TtftError | None:
    """Return the error of the predictions after the changes; None if the truth of no request is known."""
    errors = [pair.changed_error for pair in pairs if pair.changed_error is not None]
    return _error_of(errors) if errors else None


def _error_of(errors: Sequence[float]) -> TtftError:
    return TtftError(median(errors), percentile(errors, 90))


def as_text(result: ReplayResult) -> str:
    """Return the text that `baton replay` prints."""
    lines = [*_placement_lines(result.placements)]
    for each in result.steps:
        lines += _step_lines(each)
    if result.engine is not None:
        lines += _engine_lines(result.engine)
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


def _engine_lines(check: EngineCheck) -> Iterator[str]:
    if not check.is_model:
        yield "model: not the recorded one (its fingerprint differs: other weights, dtype or KV dtype)"
    for each in check.workers:
        yield from _step_lines(each, "computed steps")


def _step_lines(check: StepCheck, what: str = "steps") -> Iterator[str]:
    skipped = f", the first {check.skipped} skipped" if check.skipped else ""
    stopped = f"; then stopped: {check.stopped}" if check.stopped else ""
    yield f"{what} of {check.worker}: {check.checked} of {check.steps} as recorded{skipped}{stopped}"
    if check.difference is None:
        return
    step = check.difference.step
    calls = ", ".join(f"{call.kind} {call.request_number}" for call in step.calls) or "none"
    yield f"  first difference: step {step.number}, after the calls: {calls}"
    if check.difference.refused:
        yield f"    refused: {check.difference.refused}"
        return
    if check.difference.result is not None:
        yield f"    {_result(check.difference.result)}"
        return
    yield f"    recorded: {_composition(StepComposition.of_record(step))}"
    yield f"    planned:  {_composition(check.difference.planned)}"


def _result(result: ResultDifference) -> str:
    if not result.request_id:
        return "all sampled tokens are as recorded, their log-probabilities are not"
    return (
        f"request {result.request_id}, token {result.position} of the answer: "
        f"recorded {result.recorded}, computed {result.computed}"
    )


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
_TRUE: Columns[TtftPair] = {
    **_CHANGED,
    "truth": lambda pair: f"{pair.true_ms:,.0f}" if pair.true_ms else "-",
    "error": lambda pair: "-" if pair.changed_error is None else f"{pair.changed_error:.0%}",
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
    if (error := change_error(kept)) is not None:
        known = [pair for pair in kept if pair.changed_error is not None]
        true_ms, measured_ms = median(pair.true_ms for pair in known), median(pair.request.ttft_ms for pair in known)
        yield f"truth: measured median {true_ms:,.0f} ms instead of {measured_ms:,.0f} ms; {_error_text(error, known)}"
    if result.past is not None:
        yield str(result.past)
    yield ""
    columns = _CHANGED if result.truth is None else _TRUE
    yield table(sorted(kept, key=lambda pair: -abs(pair.change_ms))[:SHOWN_REQUESTS], columns)


def _error_text(error: TtftError, pairs: Sequence[TtftPair]) -> str:
    return f"error of {len(pairs)} predictions: median {error.median:.0%}, p90 {error.p90:.0%}"


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
        "steps": list(map(_plain_check, result.steps)),
        "model_as_recorded": None if result.engine is None else result.engine.is_model,
        "computed_steps": None if result.engine is None else list(map(_plain_check, result.engine.workers)),
        "step_times": {role: asdict(fit) for role, fit in result.fits.items()},
        "error": prediction_error(pairs)._asdict() if pairs else None,
        "change": str(result.what_if),
        "change_error": None if (changed := change_error(pairs)) is None else changed._asdict(),
        "past": None if result.past is None else asdict(result.past),
        "requests": [
            {
                "request_id": pair.request.request_id,
                "ttft_ms": pair.request.ttft_ms,
                "predicted_ttft_ms": pair.predicted.ttft_ms,
                "changed_ttft_ms": None if pair.changed is None else pair.changed.ttft_ms,
                "true_ttft_ms": pair.true_ms or None,
            }
            for pair in pairs
        ],
    }


def _plain_check(check: StepCheck) -> dict[str, Any]:
    difference = check.difference
    return {
        **{name: getattr(check, name) for name in ("worker", "steps", "skipped", "checked", "stopped")},
        "first_difference": None if difference is None else difference.step.number,
        "result": None if difference is None or difference.result is None else difference.result._asdict(),
    }
