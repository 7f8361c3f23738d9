"""Why a token came late: the steps since the last one, split into causes that add up."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.decode_worker.gaps import KEPT_NAMES, Gap, Moment, RequestNames, StepGaps
from baton.engine.runner.step_records import (
    ChoiceKey,
    DraftPart,
    PromptChunk,
    StepHistory,
    StepRecord,
    StepTimeBreakdown,
)
from baton.engine.scheduler.speculation import StepPrices
from baton.text.causes import StallCause

USUAL_S = 0.010
OWN = ChoiceKey(1, 0)
STEPS = 40


class World:
    """Steps of an engine that makes the answers of request 1 and others."""

    def __init__(self, usual_steps: int = STEPS) -> None:
        self.history, self.names = StepHistory(), RequestNames()
        self.gaps = StepGaps(self.history, self.names)
        for number in (1, 2, 3):
            self.names.add(number, f"r{number}")
        self.now, self.number = 100.0, 0
        for _ in range(usual_steps):
            self.step()

    def step(self, spent: StepTimeBreakdown | None = None, **fields: Any) -> StepRecord:
        spent = spent or StepTimeBreakdown(USUAL_S)
        self.number, self.now = self.number + 1, self.now + sum(spent)
        fields = {"answers": (1, 2), "contexts": (50, 60), **fields}
        record = StepRecord(self.now - sum(spent), self.now, number=self.number, spent=spent, **fields)
        self.history.add(record)
        self.gaps.begin(record)
        return record

    def gap_after(self, *steps: tuple[StepTimeBreakdown, dict[str, Any]]) -> Gap | None:
        last = Moment(self.number, self.now)
        records = [self.step(spent, **fields) for spent, fields in steps]
        gap = self.gaps.explain(OWN, last) if self.gaps.is_late(last, records[-1]) else None
        if gap is not None:
            assert gap.total_ms == pytest.approx((records[-1].ended - last.at_s) * 1e3, abs=0.2)
        return gap


def first_cause(gap: Gap | None) -> tuple[StallCause, str, float]:
    assert gap is not None
    return gap.causes[0].cause, gap.causes[0].request_id, round(gap.causes[0].ms)


def test_usual_step_is_not_explained() -> None:
    assert World().gap_after((StepTimeBreakdown(USUAL_S), {})) is None


def test_worker_without_steps_explains_no_gap() -> None:
    world = World(usual_steps=0)
    assert not world.gaps.is_late(Moment(0, 0.0), StepRecord(0.0, 1.0, number=1))


def test_prompt_in_the_step_is_blamed() -> None:
    gap = World().gap_after((StepTimeBreakdown(0.110), {"prompts": (PromptChunk(3, 500),)}))
    assert first_cause(gap) == (StallCause.PROMPTS, "r3", 100)
    assert gap is not None and gap.usual_ms == pytest.approx(10.0)


DRAFTS: dict[str, Any] = {"drafts": (DraftPart(1, 0, 2), DraftPart(2, 0, 6)), "prices": StepPrices(USUAL_S, 0.030)}


def test_drafts_are_blamed_for_their_known_cost() -> None:
    gap = World().gap_after((StepTimeBreakdown(0.045), DRAFTS))
    assert first_cause(gap) == (StallCause.DRAFTS, "r2", 30)
    assert gap is not None and gap.causes[0].detail == "8 drafted tokens in a step"
    assert gap.causes[1].cause is StallCause.SLOWER and gap.usual_ms == pytest.approx(10.0)


def test_prompt_next_to_drafts_is_blamed_for_the_rest() -> None:
    gap = World().gap_after((StepTimeBreakdown(0.110), {**DRAFTS, "prompts": (PromptChunk(3, 500),)}))
    assert gap is not None
    assert [(part.cause, round(part.ms)) for part in gap.causes] == [(StallCause.PROMPTS, 70), (StallCause.DRAFTS, 30)]


def test_usual_step_excludes_drafts_where_every_step_has_them() -> None:
    world = World(usual_steps=0)
    for _ in range(STEPS):
        world.step(StepTimeBreakdown(0.040), **DRAFTS)
    gap = world.gap_after((StepTimeBreakdown(0.080), DRAFTS))
    assert gap is not None and gap.usual_ms == pytest.approx(10.0)
    assert {part.cause: round(part.ms) for part in gap.causes} == {StallCause.DRAFTS: 30, StallCause.SLOWER: 40}


def test_two_prompts_are_blamed_by_their_tokens() -> None:
    gap = World().gap_after((StepTimeBreakdown(0.110), {"prompts": (PromptChunk(2, 100), PromptChunk(3, 300))}))
    assert gap is not None
    assert [(part.request_id, round(part.ms)) for part in gap.causes] == [("r3", 75), ("r2", 25)]


@pytest.mark.parametrize(
    ("part", "cause"),
    [
        ("idle_s", StallCause.IDLE),
        ("lent_s", StallCause.LENT),
        ("moving_s", StallCause.COPIES),
        ("collecting_s", StallCause.COLLECTION),
        ("queued_s", StallCause.CPU_WAIT),
        ("locked_s", StallCause.LOCK),
        ("stopped_s", StallCause.STOPPED),
    ],
)
def test_each_part_of_a_step_has_its_cause(part: str, cause: StallCause) -> None:
    gap = World().gap_after((StepTimeBreakdown(USUAL_S)._replace(**{part: 0.2}), {}))
    assert first_cause(gap) == (cause, "", 200)


def test_mask_that_the_step_waited_for_is_blamed_on_its_request() -> None:
    gap = World().gap_after((StepTimeBreakdown(USUAL_S, masks_s=0.2), {"late": (ChoiceKey(2, 0),)}))
    assert first_cause(gap) == (StallCause.MASK, "r2", 200)


def test_steps_without_this_answer_are_its_late_mask() -> None:
    late = (StepTimeBreakdown(USUAL_S), {"late": (OWN,)})
    gap = World().gap_after(late, late, late, (StepTimeBreakdown(USUAL_S), {}))
    assert first_cause(gap) == (StallCause.MASK, "r1", 30)


def test_preempted_answer_blames_the_largest_other_even_if_finished() -> None:
    without = (StepTimeBreakdown(USUAL_S), {"preempted": (OWN,), "answers": (2, 3), "contexts": (60, 900)})
    recomputes = (StepTimeBreakdown(0.050), {"prompts": (PromptChunk(1, 80),), "answers": (), "contexts": ()})
    gap = World().gap_after(without, without, recomputes)
    assert first_cause(gap) == (StallCause.PREEMPTION, "r3", 60)


def test_batch_and_context_growth_is_blamed_at_recent_cost() -> None:
    """A step of n answers took 5 ms, 1 ms for each, and 1 us for each token of their contexts."""
    world = World(usual_steps=0)

    def step_of(answers: int, context_tokens: int) -> tuple[StepTimeBreakdown, dict[str, Any]]:
        spent = StepTimeBreakdown(0.005 + 0.001 * answers + 1e-6 * answers * context_tokens)
        return spent, {"answers": tuple(range(answers)), "contexts": (context_tokens,) * answers}

    for index in range(60):
        spent, fields = step_of(2 + (index % 3 == 0), 50 + 10 * (index % 7))
        world.step(spent, **fields)
    more = world.gap_after(step_of(32, 50))
    assert first_cause(more)[0] is StallCause.BATCH
    longer = world.gap_after(step_of(2, 20_000))
    assert first_cause(longer)[0] is StallCause.CONTEXTS


def test_answers_of_a_batch_share_an_explanation_except_a_skipped_one() -> None:
    world = World()
    last = Moment(world.number, world.now)
    world.step(StepTimeBreakdown(0.060), preempted=(ChoiceKey(3, 0),))
    middle = Moment(world.number, world.now)
    world.step(StepTimeBreakdown(0.040))
    causes = {
        name: first_cause(world.gaps.explain(ChoiceKey(request, 0), since))[0]
        for name, request, since in [("one", 1, middle), ("two", 2, middle), ("left out", 3, last)]
    }
    assert causes == {"one": StallCause.SLOWER, "two": StallCause.SLOWER, "left out": StallCause.PREEMPTION}


def test_same_work_that_took_longer_is_slower_computation() -> None:
    assert first_cause(World().gap_after((StepTimeBreakdown(0.060), {}))) == (StallCause.SLOWER, "", 50)


def test_waiting_that_every_step_has_is_usual() -> None:
    """The engine's thread waits for others of its process that compute for it."""
    world = World(usual_steps=0)
    for _ in range(STEPS):
        world.step(StepTimeBreakdown(0.006, locked_s=0.004))
    gap = world.gap_after((StepTimeBreakdown(0.106, locked_s=0.004), {}))
    assert first_cause(gap) == (StallCause.SLOWER, "", 100)
    assert gap is not None and gap.usual_ms == pytest.approx(10.0)


SECONDS = st.floats(0.0, 0.5)
STEP = st.tuples(
    st.builds(StepTimeBreakdown, *[SECONDS] * 9),
    st.fixed_dictionaries(
        {},
        optional={
            "prompts": st.just((PromptChunk(2, 10), PromptChunk(3, 1))),
            "preempted": st.just((OWN,)),
            "late": st.sampled_from([(OWN,), (ChoiceKey(2, 0),)]),
            "moved_blocks": st.integers(1, 3),
            "drafts": st.just((DraftPart(2, 0, 3),)),
            "prices": st.just(StepPrices(0.01, 0.1)),
        },
    ),
)


@given(st.lists(STEP, min_size=1, max_size=4))
def test_usual_time_and_causes_add_up_to_the_gap(steps: list[tuple[StepTimeBreakdown, dict[str, Any]]]) -> None:
    gap = World().gap_after(*steps)  # which compares the sums
    assert gap is None or all(part.ms > 0.0 for part in gap.causes)


def test_hand_over_is_explained_where_it_is_long() -> None:
    gaps = World().gaps
    assert gaps.held(StepTimeBreakdown(0.001)) == ()
    [first, second] = gaps.held(StepTimeBreakdown(0.030, collecting_s=0.020))
    assert (first.cause, second.cause) == (StallCause.WORKER_LOOP, StallCause.COLLECTION)


def test_names_of_old_requests_are_forgotten() -> None:
    names = RequestNames()
    for number in range(KEPT_NAMES + 1):
        names.add(number, str(number))
    assert (names.of(0), names.of(1), names.of(KEPT_NAMES)) == ("", "1", str(KEPT_NAMES))
