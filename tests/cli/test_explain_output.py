"""What `baton explain` prints: each attempt with its own figures, and costs that are seen to add up."""

from dataclasses import replace

from baton.cli.explain import lines
from baton.client import Candidate, ExplainedAttempt, RequestExplanation

PREFILL = Candidate(
    "prefill-0", "h:1", "prefill", True, "",
    {"balance_ms": 2.5, "compute_ms": 40.0, "cost": 142.5, "hit_blocks": 3.0, "limit_blocks": 9.0, "wait_ms": 100.0},
    ("wait_ms", "compute_ms", "balance_ms"),
)  # fmt: skip
DECODE = Candidate(
    "decode-0", "h:2", "decode", True, "",
    {"cost": -7.0, "less_cached_tokens": -12.0, "tokens_in_flight": 5.0}, ("tokens_in_flight", "less_cached_tokens"),
)  # fmt: skip
FULL = Candidate("decode-1", "h:3", "decode", False, "no slot is free in its batch", {"tokens_in_flight": 8.0})


def attempt(ttft_ms: float, failure: str = "") -> ExplainedAttempt:
    predicted = {"decode_hit_tokens": 96.0, "expected_ttft_ms": 50.0, "prefill_hit_tokens": 0.0}
    actual = {"decode_cached_tokens": 64.0, "prefill_ms": 30.0, "ttft_ms": ttft_ms}
    failed = "h:2" if failure else ""
    return ExplainedAttempt((PREFILL, DECODE, FULL), "cache_aware", "why", 1.0, predicted, actual, "", failure, failed)


def explanation(*attempts: ExplainedAttempt) -> RequestExplanation:
    return RequestExplanation("req-1", 1.0, 7, "OK", attempts, 61.0, 900.0, 2.0, 3.0)


def test_a_cost_is_shown_as_the_sum_that_it_is() -> None:
    text = list(lines(explanation(attempt(60.0))))
    (prefill,) = [line for line in text if "prefill-0" in line]
    assert prefill.split("  ")[-1].strip() == "cost 142.50 ms = wait 100 + compute 40 + balance 2.50"
    (decode,) = [line for line in text if "decode-0" in line]
    assert decode.split("  ")[-1].strip() == "cost -7 = tokens in flight 5 + less cached tokens -12"
    assert text[text.index(prefill) + 1].strip() == "hit blocks 3", "sizes are left to --json"


def test_a_worker_that_was_no_candidate_says_why() -> None:
    (full,) = [line for line in lines(explanation(attempt(60.0))) if "decode-1" in line]
    assert full.startswith("   ") and full.endswith("(no slot is free in its batch)")


def test_each_attempt_has_its_own_first_token_and_names_the_worker_that_failed() -> None:
    text = list(lines(explanation(attempt(60.0, "WORKER_DIED: gone"), attempt(250.0))))
    assert [line.rpartition(" ")[2] for line in text if "first token after the dispatch" in line] == ["60", "250"]
    assert "  failed at decode-0: WORKER_DIED: gone" in text


def test_a_prompt_that_decode_computed_is_compared_with_what_decode_was_thought_to_have() -> None:
    text = list(lines(explanation(attempt(60.0))))
    assert "    cached on decode: predicted 96, was 64" in text
    assert not any(line.startswith("    cached tokens") for line in text)


def test_the_session_is_named_where_there_is_one() -> None:
    without = explanation(attempt(60.0))
    assert not any("session" in line for line in lines(without))
    assert "a turn of session agent-7" in list(lines(replace(without, session_id="agent-7")))
