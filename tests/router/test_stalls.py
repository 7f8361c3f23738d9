"""Stalls of a request: gaps that stand out, each split into causes that add up to it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.process.telemetry.loop_lag import Delay
from baton.router.trace.record import MAX_STALLS, GapSummary, Stall, TokenGaps
from baton.router.trace.stalls import StallBound, gap_summary
from baton.router.types.events import Made, WorkerGap
from baton.text.causes import CausePart, StallCause, joined_causes

QUIET = Delay(0.0, 0.0)
STEP_S = 0.010
WORKER_AHEAD_US = 7_000_000  # of the router's clock
PROMPT = CausePart(StallCause.PROMPTS, 200.0, "r2")


def summary(gaps: TokenGaps, delay: Delay = QUIET, bound: StallBound | None = None) -> GapSummary:
    made = gap_summary(gaps, bound or StallBound(), lambda began_s, ended_s: delay)
    assert made is not None
    return made


class Stream:
    """Tokens that a worker makes every 10 ms and that arrive at once."""

    def __init__(self, tokens: int = 50) -> None:
        self.gaps, self.made_s, self.arrived_s = TokenGaps(), 10.0, 10.0
        for _ in range(tokens):
            self.token()

    def token(
        self,
        made_after_s: float = STEP_S,
        late_s: float = 0.0,
        held_s: float = 0.0,
        since_s: float = 0.0,
        gap: WorkerGap | None = None,
        held: tuple[CausePart, ...] = (),
        together: int = 1,
    ) -> None:
        """`late_s`: on its way, after it was held by its worker. `together`: tokens of the step."""
        self.made_s += made_after_s
        self.arrived_s = max(self.arrived_s, self.made_s + held_s + late_s)
        since = (CausePart(StallCause.CPU_WAIT, since_s * 1e3, detail="of the worker"),) if since_s else ()
        made = Made(round(self.made_s * 1e6) + WORKER_AHEAD_US, round(held_s * 1e6), gap, held, since)
        self.gaps.add(0, together, self.arrived_s, made)

    def stall(self, delay: Delay = QUIET) -> Stall:
        [stall] = summary(self.gaps, delay).stalls
        total_ms = stall.usual_ms + sum(part.ms for part in stall.causes)
        assert total_ms == pytest.approx(stall.gap_ms, abs=0.5)
        return stall


def causes(stall: Stall) -> list[tuple[StallCause, int]]:
    return [(part.cause, round(part.ms)) for part in stall.causes]


def test_bound_is_a_multiple_of_the_median_and_at_least_so_much() -> None:
    assert (StallBound().above(3.0), StallBound().above(30.0)) == (20.0, 60.0)
    stream = Stream()
    stream.token(0.019)
    assert summary(stream.gaps).stalls == ()
    assert len(summary(stream.gaps, bound=StallBound(1.5, 5.0)).stalls) == 1


def test_single_token_steps_do_not_stand_out_among_longer_ones() -> None:
    """With drafts most steps make several tokens: the median gap of a token is a part of a step."""
    stream = Stream(tokens=1)
    for number in range(50):
        stream.token(0.030, together=1 if number % 5 == 0 else 4)
    found = summary(stream.gaps)
    assert found.p50_ms == pytest.approx(7.5) and found.stalls == ()


def test_pause_before_tokens_sent_together_is_one_stall() -> None:
    stream = Stream()
    stream.token(0.210, gap=WorkerGap(10.0, (PROMPT,)), together=4)
    stall = stream.stall()
    assert stall.gap_ms == pytest.approx(210.0) and stall.causes == (PROMPT,)


def test_worker_causes_belong_to_their_gap() -> None:
    stream = Stream()
    stream.token(0.210, gap=WorkerGap(10.0, (PROMPT,)))
    stall = stream.stall()
    assert stall.causes == (PROMPT,) and stall.usual_ms == pytest.approx(10.0)


def test_time_on_the_way_is_the_network() -> None:
    stream = Stream()
    stream.token(late_s=0.3)
    assert causes(stream.stall())[0] == (StallCause.NETWORK, 300)


def test_time_in_which_the_router_was_busy_is_its_event_loop() -> None:
    stream = Stream()
    stream.token(late_s=0.3)
    assert causes(stream.stall(Delay(0.25, 0.0))) == [(StallCause.ROUTER_LOOP, 250), (StallCause.NETWORK, 50)]


def test_router_that_waited_for_a_core_says_so() -> None:
    stream = Stream()
    stream.token(late_s=0.3)
    stall = stream.stall(Delay(0.0, 5.0))
    assert causes(stall) == [(StallCause.CPU_WAIT, 300)] and stall.causes[0].detail == "of the router"


def test_token_that_its_worker_held_back() -> None:
    stream = Stream()
    stream.token(held_s=0.2)
    assert causes(stream.stall())[0] == (StallCause.WORKER_LOOP, 200)
    stream = Stream()
    collection = (CausePart(StallCause.COLLECTION, 150.0), CausePart(StallCause.WORKER_LOOP, 50.0))
    stream.token(held_s=0.2, held=collection)
    assert causes(stream.stall()) == [(StallCause.COLLECTION, 150), (StallCause.WORKER_LOOP, 50)]


def test_worker_without_a_core_says_so_with_a_later_token() -> None:
    """It made three tokens that all left when it had a core again; the last says how long it had waited."""
    stream = Stream()
    stream.token(late_s=0.3)
    stream.token(late_s=0.29)
    stream.token(0.300, since_s=0.3)
    assert causes(stream.stall())[0][0] is StallCause.CPU_WAIT


def test_gap_after_a_late_token_is_shorter_than_on_the_worker() -> None:
    """Of the 210 ms on the worker 100 had passed when the token before came."""
    stream = Stream()
    stream.token(late_s=0.1)
    stream.token(0.210, gap=WorkerGap(10.0, (PROMPT,)))
    first, second = summary(stream.gaps).stalls
    assert causes(first)[0][0] is StallCause.NETWORK
    assert second.gap_ms == pytest.approx(110.0) and causes(second) == [(StallCause.PROMPTS, 105)]


def test_another_attempt_is_a_recovery_from_the_worker_that_was_lost() -> None:
    stream = Stream()
    stream.gaps.resume(0, stream.arrived_s, stream.arrived_s + 0.5, "d0")
    stall = stream.stall()
    assert [(part.cause, part.detail) for part in stall.causes] == [(StallCause.RECOVERY, "d0")]


def test_worker_that_does_not_say_when_it_made_its_tokens() -> None:
    gaps = TokenGaps()
    for index in range(50):
        gaps.add(0, 1, 10.0 + index * STEP_S)
    gaps.add(0, 1, 11.0)
    [stall] = summary(gaps).stalls
    assert [part.cause for part in stall.causes] == [StallCause.UNKNOWN]
    assert stall.usual_ms == pytest.approx(10.0)


@pytest.mark.parametrize("order", [1, -1], ids=["growing", "shrinking"])
def test_longest_of_many_stalls_are_kept_in_order(order: int) -> None:
    count = 20 * MAX_STALLS
    stream = Stream(tokens=2 * count)
    for index in range(count)[::order]:
        stream.token(0.050 + index * 1e-5)
    assert len(stream.gaps.long) <= 2 * MAX_STALLS
    stalls = summary(stream.gaps).stalls
    assert len(stalls) == MAX_STALLS
    assert summary(stream.gaps).stall_count == count
    assert [stall.at_s for stall in stalls] == sorted(stall.at_s for stall in stalls)
    assert min(stall.gap_ms for stall in stalls) > 50.0 + (count - MAX_STALLS - 1) * 1e-2


SECONDS = st.floats(0.0, 0.3)
TOKEN = st.fixed_dictionaries(
    {"made_after_s": st.floats(0.001, 0.3), "late_s": SECONDS, "held_s": SECONDS, "since_s": SECONDS},
    optional={"gap": st.just(WorkerGap(10.0, (PROMPT,))), "held": st.just((CausePart(StallCause.LOCK, 3.0),))},
)


@given(st.lists(TOKEN, min_size=1, max_size=20), st.builds(Delay, SECONDS, SECONDS))
def test_usual_time_and_causes_always_add_up(tokens: list[dict[str, float]], delay: Delay) -> None:
    stream = Stream()
    for token in tokens:
        stream.token(**token)  # type: ignore[arg-type]
    for stall in summary(stream.gaps, delay).stalls:
        total_ms = stall.usual_ms + sum(part.ms for part in stall.causes)
        assert total_ms == pytest.approx(stall.gap_ms, rel=0.05)
        assert all(part.ms > 0.0 for part in stall.causes)


def test_parts_of_one_cause_and_culprit_are_one() -> None:
    parts = [CausePart(StallCause.NETWORK, 1.0), CausePart(StallCause.NETWORK, 2.0, detail="slow"), PROMPT]
    assert joined_causes([*parts, CausePart(StallCause.LOCK, 0.0)]) == [
        PROMPT,
        CausePart(StallCause.NETWORK, 3.0, detail="slow"),
    ]
