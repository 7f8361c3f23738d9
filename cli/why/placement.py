"""The placement of a request: each attempt with its candidates, their costs, and predictions next to outcomes."""

from collections.abc import Iterator

from baton.cli.layout import ms, wrapped
from baton.client import Candidate, ExplainedAttempt, RequestExplanation

COMPARED = (
    ("cached tokens", "prefill_hit_tokens", "cached_tokens"),
    ("loaded from files", "loaded_tokens", "loaded_tokens"),
    ("cached on decode", "decode_hit_tokens", "decode_cached_tokens"),
    ("first token after the dispatch, ms", "expected_ttft_ms", "ttft_ms"),
)
"""Title, field of the prediction, field of the outcome."""


def placement_lines(found: RequestExplanation, width: int) -> Iterator[str]:
    """Yield the lines of the report on each attempt of a request."""
    session = f" of a turn of session {found.session_id}" if found.session_id else ""
    yield from wrapped([f"placement{session}"], width)
    for number, attempt in enumerate(found.attempts, 1):
        title = f"attempt {number}" if len(found.attempts) > 1 else "placed"
        policy = f" by {attempt.policy}" if attempt.policy else ""
        reason = f"  {title}{policy}, {ms(attempt.queue_ms)} after it was ready: {attempt.reason}"
        yield from wrapped([reason], width, "    ")
        if attempt.failure:
            names = {each.endpoint: each.worker_id for each in attempt.candidates}
            failed = names.get(attempt.failed_endpoint, attempt.failed_endpoint)
            yield from wrapped([f"  failed at {failed}: {attempt.failure}"], width, "    ")
        yield from _candidates(attempt, width)
        yield from wrapped([*_compared(attempt)], width, "      ")


def _candidates(attempt: ExplainedAttempt, width: int) -> Iterator[str]:
    name_width = max((len(each.worker_id) for each in attempt.candidates), default=0)
    for each in sorted(attempt.candidates, key=lambda each: (each.role, each.worker_id)):
        weighed = f"({each.excluded})" if each.excluded else _cost(each)
        line = f"  {'*' if each.chosen else ' '} {each.worker_id:<{name_width}}  {each.role:<7}  {weighed}"
        yield from wrapped([line.rstrip()], width, "      ")
        if known := _known(each):
            yield from wrapped([f"      {known}"], width, "      ")


def _cost(candidate: Candidate) -> str:
    """Format the cost as the sum of its terms; empty if the candidate had no cost."""
    terms, names = candidate.terms, candidate.cost_terms
    if not names:
        return ""
    unit = " ms" if all(name.endswith("_ms") for name in names) else ""
    parts = " + ".join(f"{_words(name.removesuffix('_ms'))} {_number(terms[name])}" for name in names)
    return f"cost {_number(terms['cost'])}{unit} = {parts}"


def _known(candidate: Candidate) -> str:
    """Format the candidate's values other than cost terms; totals and limits are only in --json."""
    apart = {"cost", *candidate.cost_terms}
    return ", ".join(
        f"{_words(name)} {_number(value)}"
        for name, value in candidate.terms.items()
        if name not in apart and not name.startswith(("total_", "limit_"))
    )


def _compared(attempt: ExplainedAttempt) -> Iterator[str]:
    actual = attempt.actual
    for title, prediction, outcome in COMPARED:
        if outcome in actual:
            predicted = attempt.predicted.get(prediction)
            forecast = "not predicted" if predicted is None else f"predicted {_number(predicted)}"
            yield f"    {title}: {forecast}, was {_number(actual[outcome])}"
    compared = {outcome for _, _, outcome in COMPARED}
    rest = ", ".join(f"{_words(name)} {_number(value)}" for name, value in actual.items() if name not in compared)
    if rest:
        yield f"    then: {rest}" + (f" ({attempt.transport})" if attempt.transport else "")


def _words(name: str) -> str:
    return name.replace("_", " ")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.2f}"
