"""What `baton why` prints: three sentences that are plain English, and tables that fit a terminal."""

import json
from dataclasses import replace

import pytest

import baton.cli.connection
from baton.cli.layout import ms, seconds
from baton.cli.why.placement import placement_lines
from baton.cli.why.sentences import cached, changed, drafts, first_token, ignored, sentences, stalls
from baton.cli.why.show import show_why
from baton.cli.why.tables import WIDTH, colocated_sentences, lines
from baton.cli.why.words import CAUSES, age
from baton.client import (
    BlockRun,
    CacheAutopsy,
    Candidate,
    ColocatedPrefill,
    ExplainedAttempt,
    ModelNotFound,
    PromptChange,
    RequestDrafts,
    RequestExplanation,
    RequestStages,
    RequestStall,
    RequestWhy,
    StallCausePart,
)
from baton.launch import CommandFailed
from baton.text.causes import StallCause
from tests.fixtures.admin_clients import FakeAdmin

CHOSEN = tuple(
    Candidate(f"{role}-0", "h:1", role, True, "", {}) for role in ("prefill", "decode")
)  # fmt: skip
ATTEMPT = ExplainedAttempt(
    CHOSEN, "cache_aware", "prefill-0 computes the prompt, decode-0 continues from there", 1.0,
    {"expected_ttft_ms": 700.0, "prefill_hit_tokens": 512.0}, {"ttft_ms": 770.0}, "", "", "",
)  # fmt: skip
PLACED = RequestExplanation("req-1", 12.0, 1536, "OK", (ATTEMPT,), 812.0, 2000.0, 12.0, 40.0)
STAGES = RequestStages(812.0, 40.0, 1.0, 0.0, 150.0, 610.0, 11.0, 20.0, 0.0, 5.0, 0.0, 15.0, 2000.0)
CACHE = CacheAutopsy(
    "prefill-0", 1, 32,
    (
        BlockRun(0, 16, "cached", "", 0.0, 0.0),
        BlockRun(16, 20, "evicted", "", 11.8, 14.0),
        BlockRun(36, 11, "never", "", 0.0, 0.0),
    ),
    312.0, 16,
)  # fmt: skip
COLOCATED = ColocatedPrefill(
    "decode-0", False, "measured", 2310.0, 200.0, 770.0, 1536, 5, 12.0, 23, 0.142, 1.1, 1200
)  # fmt: skip
FOUND = RequestWhy(PLACED, STAGES, (), 0, 30.1, CACHE, COLOCATED)
BLAMED = RequestStall(
    1200.0, 402.0, 12.0,
    (StallCausePart("prompt_tokens", 380.0, "req-7", "512 tokens"), StallCausePart("network", 10.0, "", "")),
)  # fmt: skip


def autopsy(*runs: BlockRun, expected: int = 0) -> RequestWhy:
    return replace(FOUND, cache=replace(CACHE, runs=runs, expected_blocks=expected))


def run(fate: str, blocks: int = 1, worker: str = "") -> BlockRun:
    return BlockRun(0, blocks, fate, worker, 12.0, 12.0)


def test_why_first_token_names_largest_stages() -> None:
    assert first_token(FOUND) == (
        "The first token came after 812 ms: 610 ms (75 %) to compute 1,024 of 1,536 prompt tokens on prefill-0, "
        "150 ms (18 %) waiting on prefill-0 and 52 ms for the rest."
    )


def test_why_first_token_names_single_dominant_stage() -> None:
    stages = replace(STAGES, ttft_ms=1000.0, router_queue_ms=990.0, prefill_queue_ms=0.0, prefill_ms=8.0, return_ms=1.0)
    found = replace(FOUND, stages=stages)
    assert first_token(found) == "The first token came after 1,000 ms: 990 ms (99 %) in the router's queue."


def test_why_first_token_without_token_names_outcome() -> None:
    stages = RequestStages(0.0, 950.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1000.0)
    found = replace(FOUND, stages=stages, placed=replace(PLACED, status="UNAVAILABLE"))
    assert first_token(found) == (
        "No token came: the request ended with UNAVAILABLE after 1,000 ms, 950 ms of it in the router's queue."
    )


def test_why_stalls_without_stall_says_so() -> None:
    assert stalls(FOUND) == "No gap between its tokens was a stall: 12 ms at the median, 30 ms at most."
    assert stalls(replace(FOUND, longest_gap_ms=0.0)) == ("The answer was too short to have gaps between later tokens.")


def test_why_stalls_names_largest_cause() -> None:
    other = replace(BLAMED, gap_ms=120.0, causes=(StallCausePart("preemption", 70.0, "req-1", ""),))
    found = replace(FOUND, stalls=(BLAMED, other), stall_count=2, longest_gap_ms=402.0)
    assert stalls(found) == (
        "2 stalls between its tokens took 522 ms (12 ms at the median, 402 ms at most), "
        "380 ms of it because of computing prompt tokens for request req-7."
    )
    own = replace(FOUND, stalls=(other,), stall_count=9, longest_gap_ms=402.0)
    assert stalls(own) == (
        "The longest 1 of 9 stalls between its tokens took 120 ms (12 ms at the median, "
        "402 ms at most), 70 ms of it because of preemption for this request itself."
    )


def test_why_sentences_include_drafts() -> None:
    assert len(sentences(FOUND)) == 3
    found = replace(FOUND, drafts=RequestDrafts(20, 12, 34.4))
    time = "about 34 ms sooner than without drafts."
    assert sentences(found)[2] == f"Of 20 drafted tokens 12 were accepted: its answer came {time}"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (RequestDrafts(1, 0, -2.0), "Of 1 drafted token none were accepted: its answer came about 2.0 ms later"),
        (RequestDrafts(0, 0, -5.0), "Tokens were drafted for other answers only: its own came about 5.0 ms later"),
    ],
)
def test_why_drafts_that_cost_time_say_so(given: RequestDrafts, said: str) -> None:
    assert drafts(given) == f"{said} than without drafts."


def test_why_shows_prompt_change_and_ignored_fields() -> None:
    found = replace(FOUND, prompt_change=PromptChange(12, "2. Be brief"), not_acted_upon=("store", "tools[4] (x)"))

    assert changed(FOUND) == ignored(FOUND) == ()
    assert sentences(found)[-2:] == (
        "Its prompt differs from the last turn at token 12: '2. Be brief'; no KV of the session from there on could be "
        "reused.",
        "Accepted, but not acted upon: store and tools[4] (x).",
    )


def test_why_cached_counts_fates_of_blocks() -> None:
    assert cached(FOUND) == (
        "Of the 47 blocks of its prompt, prefill-0 had 16 in its cache, as predicted; "
        "20 were evicted 12–14 s before and 11 were not cached in the 312 s that are known."
    )


@pytest.mark.parametrize(
    ("runs", "expected", "said"),
    [
        ([run("cached", 3)], 3, "had 3 in its cache, as predicted."),
        (
            [run("cached", 2), run("gone", 1)],
            3,
            "(3 were predicted); 1 was evicted before the prompt's turn, though expected at the placement.",
        ),
        ([run("fetched", 2, "decode-1")], 0, "had none in its cache, as predicted; 2 were fetched from decode-1."),
        ([run("loaded", 2)], 0, "had none in its cache, as predicted; 2 were loaded from files."),
        ([run("elsewhere", 2, "decode-1")], 0, "; 2 were on decode-1, not fetched."),
        ([run("other_salt", 1, "decode-1")], 0, "; 1 was on decode-1 under another cache salt or none."),
        ([run("unknown", 4)], 0, "; 4 were unknown, as prefill-0 does not report its cache."),
        ([run("unused", 4)], 0, "computed without the cache: all of its log-probabilities were requested."),
        ([], 0, "Its prompt has no reusable block of 32 tokens: none could be cached."),
    ],
)
def test_why_cached_describes_each_fate(runs: list[BlockRun], expected: int, said: str) -> None:
    assert cached(autopsy(*runs, expected=expected)).endswith(said)


def test_why_cached_of_other_router_is_unknown() -> None:
    found = replace(FOUND, cache=None, colocated=None)
    assert cached(found) == "Another router placed its prompt: what was cached is not known here."
    assert "to compute its prompt on its worker" in first_token(found)
    assert not any("instead" in line for line in lines(found))


def test_why_colocated_prefill_states_prediction_error() -> None:
    assert colocated_sentences(COLOCATED) == [
        "Computing 1,536 tokens there: first token predicted after 2,310 ms, 200 ms of it for other prompts; "
        "with the prefill worker it came after 770 ms (from the dispatch).",
        "It would have slowed the steps of 5 answers there, with about 12 ms between their tokens.",
        "Such predictions were off by 14 % for prompts that decode workers computed (23 of about 1,200 tokens; "
        "median): the first token took 1.10 times as long as predicted.",
    ]


def test_why_colocated_prefill_states_assumptions() -> None:
    unproven = replace(COLOCATED, basis="assumed", checked_requests=0, answers=0, wait_ms=0.0)
    assert colocated_sentences(unproven)[1:] == [
        "The rate is assumed, from other workers or from prompts without concurrent answers.",
        "The error of this prediction is unknown: no decode worker has computed a prompt yet.",
    ]
    assert colocated_sentences(replace(COLOCATED, basis="")) == [
        "Its cost on decode-0 is unknown: no worker has reported its prefill rate."
    ]


def test_why_local_prefill_is_compared_with_prediction() -> None:
    local = replace(COLOCATED, is_local=True, wait_ms=0.0, checked_requests=1)
    first, error = colocated_sentences(local)
    assert first == "It computed 1,536 tokens itself: first token predicted after 2,310 ms, came after 770 ms."
    assert "(one prompt of 1,200 tokens; median)" in error


def test_why_lines_fit_the_terminal() -> None:
    long_id = "req-" + "0" * 24
    found = replace(FOUND, stalls=(BLAMED,), stall_count=1, placed=replace(PLACED, request_id=long_id))
    text = list(lines(found))
    assert max(map(len, text)) <= WIDTH
    assert "  16–35  evicted 12–14 s before" in text
    assert ["prefill", "610", "ms", "75", "%"] in [row.split() for row in text]
    assert any(line.startswith("    402 ms until 1.2 s after the arrival: computing prompt tokens") for line in text)
    assert "    first token after the dispatch, ms: predicted 700, was 770" in text


@pytest.mark.parametrize("characters", range(1, 40))
def test_why_lines_keep_number_and_unit_together(characters: int) -> None:
    text = lines(replace(FOUND, cache=replace(CACHE, worker_id="p" * characters)))
    assert not any(line.split()[:1] in (["ms"], ["s"], ["%"], ["ms:"]) for line in text)


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


def placed(*failures: str, session_id: str = "") -> list[str]:
    """The placement of a request with one attempt per failure, empty for success."""
    actual = {"decode_cached_tokens": 64.0, "prefill_ms": 30.0}
    attempts = tuple(
        replace(
            ATTEMPT, candidates=(PREFILL, DECODE, FULL), predicted={"decode_hit_tokens": 96.0},
            actual=actual | {"ttft_ms": 60.0 * number}, failure=failure, failed_endpoint="h:2",
        )
        for number, failure in enumerate(failures, 1)
    )  # fmt: skip
    return list(placement_lines(replace(PLACED, attempts=attempts, session_id=session_id), WIDTH))


def test_placement_cost_is_shown_as_the_sum_of_its_terms() -> None:
    text = placed("")
    (prefill,) = [line for line in text if "* prefill-0" in line]
    assert prefill.endswith("cost 142.50 ms = wait 100 + compute 40 + balance 2.50")
    (decode,) = [line for line in text if "* decode-0" in line]
    assert decode.endswith("cost -7 = tokens in flight 5 + less cached tokens -12")
    assert text[text.index(prefill) + 1].strip() == "hit blocks 3", "sizes are left to --json"


def test_placement_names_why_a_worker_was_no_candidate() -> None:
    (full,) = [line for line in placed("") if "decode-1" in line]
    assert full.endswith("(no slot is free in its batch)") and "*" not in full


def test_placement_lists_each_attempt_with_its_failure_and_outcome() -> None:
    text = placed("WORKER_DIED: gone", "")
    assert [line.rpartition(" ")[2] for line in text if "first token after the dispatch" in line] == ["60", "120"]
    assert "  failed at decode-0: WORKER_DIED: gone" in text
    assert "    cached on decode: predicted 96, was 64" in text


def test_placement_names_the_session() -> None:
    assert placed("")[0] == "placement" and placed("", session_id="agent-7")[0].endswith("session agent-7")


def test_why_words_cover_every_cause() -> None:
    assert set(CAUSES) == {each.value for each in StallCause}


def test_layout_formats_numbers_with_units() -> None:
    assert [ms(value) for value in (0.04, 9.94, 9.96, 9999.0, 12_345.0)] == [
        "0.0 ms", "9.9 ms", "10 ms", "9,999 ms", "12.3 s"
    ]  # fmt: skip
    assert (seconds(1.23), seconds(4000.0)) == ("1.2 s", "4,000 s")
    assert (age(4.0, 4.04), age(4.0, 12.0)) == ("4.0 s", "4.0–12 s")


def admin_of(target: str) -> FakeAdmin:
    def why(request_id: str) -> RequestWhy:
        if target != "knows":
            raise ModelNotFound("no such request")
        return FOUND

    return FakeAdmin(why=why)


def test_why_asks_one_router_after_another(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(baton.cli.connection, "admin_client", admin_of)
    assert show_why("req-1", ["other", "knows"], as_json=True) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["cache"]["runs"][1] == {
        "first_block": 16, "blocks": 20, "fate": "evicted", "worker_id": "", "least_age_s": 11.8, "most_age_s": 14.0
    }  # fmt: skip
    with pytest.raises(CommandFailed, match="no router at other knows req-1"):
        show_why("req-1", ["other"], as_json=False)


def test_why_stages_that_overlap_add_up_with_the_overlap() -> None:
    overlapping = replace(
        STAGES, token_gap_ms=20.0, transfer_exposed_ms=9.4, decode_admission_ms=6.4, first_step_ms=8.2
    )
    shown = [line.split() for line in lines(replace(FOUND, stages=overlapping))]
    assert ["overlap", "-4.0", "ms", "-20", "%"] in shown
    exact = replace(STAGES, token_gap_ms=20.0, transfer_exposed_ms=0.0, decode_admission_ms=5.0, first_step_ms=15.0)
    assert not any(line.lstrip().startswith("overlap") for line in lines(replace(FOUND, stages=exact)))
