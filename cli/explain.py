"""`baton explain`: why a request was placed on its workers; `baton role`: has a worker change its role."""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict

from baton.cli.connection import admin_client, first_that_knows
from baton.client import AdminClient, Candidate, ExplainedAttempt, ModelNotFound, RequestExplanation, WorkerStatus
from baton.client.cluster import Role
from baton.launch import CommandFailed
from baton.process.foreign_text import shown

COMPARED = (
    ("cached tokens", "prefill_hit_tokens", "cached_tokens"),
    ("loaded from files", "loaded_tokens", "loaded_tokens"),
    ("cached on decode", "decode_hit_tokens", "decode_cached_tokens"),
    ("first token after the dispatch, ms", "expected_ttft_ms", "ttft_ms"),
)
"""Values shown side by side: their name, the field of the prediction, and the field of the outcome."""


def show_explanation(request_id: str, admin_targets: list[str], as_json: bool) -> int:
    """Raises: CommandFailed."""
    found = first_that_knows(request_id, admin_targets, lambda admin: admin.explain(request_id))
    print(json.dumps(asdict(found)) if as_json else "\n".join(map(shown, lines(found))))
    return 0


def lines(found: RequestExplanation) -> Iterator[str]:
    """For people."""
    yield (
        f"{found.request_id}: {found.status}, {found.prompt_tokens} prompt tokens, arrived {found.age_s:.1f} s ago; "
        f"first token after {found.ttft_ms:.1f} ms, end after {found.total_ms:.1f} ms, "
        f"{found.tbt_p50_ms:.1f} ms between tokens (p99 {found.tbt_p99_ms:.1f})"
    )
    if found.session_id:
        yield f"a turn of session {found.session_id}"
    for number, attempt in enumerate(found.attempts, 1):
        yield ""
        title = f"attempt {number}" if len(found.attempts) > 1 else "placed"
        policy = f" by {attempt.policy}" if attempt.policy else ""
        yield f"{title}{policy}, {attempt.queue_ms:.1f} ms after it was ready: {attempt.reason}"
        if attempt.failure:
            names = {each.endpoint: each.worker_id for each in attempt.candidates}
            failed = names.get(attempt.failed_endpoint, attempt.failed_endpoint)
            yield f"  failed at {failed}: {attempt.failure}"
        yield from _candidates(attempt)
        yield from _compared(attempt)


def _candidates(attempt: ExplainedAttempt) -> Iterator[str]:
    width = max((len(each.worker_id) for each in attempt.candidates), default=0)
    for each in sorted(attempt.candidates, key=lambda each: (each.role, each.worker_id)):
        weighed = f"({each.excluded})" if each.excluded else _cost(each)
        yield f"  {'*' if each.chosen else ' '} {each.worker_id:<{width}}  {each.role:<7}  {weighed}"
        if seen := _seen(each):
            yield f"    {'':<{width}}           {seen}"


def _cost(candidate: Candidate) -> str:
    """The cost and its terms; empty where nothing was weighed."""
    terms, names = candidate.terms, candidate.cost_terms
    if not names:
        return ""
    unit = " ms" if all(name.endswith("_ms") for name in names) else ""
    parts = " + ".join(f"{_words(name.removesuffix('_ms'))} {_number(terms[name])}" for name in names)
    return f"cost {_number(terms['cost'])}{unit} = {parts}"


def _seen(candidate: Candidate) -> str:
    """The values that differ from worker to worker; sizes are the same everywhere and left to --json."""
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


POLL_S = 0.1


def change_role(admin_target: str, worker_id: str, role: Role, timeout_s: float) -> int:
    """Exit code 0 when it serves so. Raises: CommandFailed."""
    began_s = time.monotonic()
    with admin_client(admin_target) as admin:
        before = _find(admin, worker_id)
        if before is not None and before.role == role and _serves(before):
            print(f"{worker_id} is a {role} worker already")
            return 0
        try:
            admin.change_role(worker_id, role)
        except ModelNotFound as error:
            raise CommandFailed(error.message) from error
        print(f"{worker_id} drains to become {role}", flush=True)
        while time.monotonic() - began_s < timeout_s:
            now = _find(admin, worker_id)
            if now is not None and now.role == role and _serves(now):
                print(f"{worker_id} serves as {role} after {time.monotonic() - began_s:.1f} s")
                return 0
            time.sleep(POLL_S)
    raise CommandFailed(f"{worker_id} does not serve as {role} after {timeout_s:g} s; see `baton status`")


def _find(admin: AdminClient, worker_id: str) -> WorkerStatus | None:
    return next((each for each in admin.status().workers if each.worker_id == worker_id), None)


def _serves(worker: WorkerStatus) -> bool:
    return worker.connected and worker.load is not None and not worker.load.draining
