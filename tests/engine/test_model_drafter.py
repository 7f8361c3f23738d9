"""A drafting model's blocks and passes: a model that remembers what each block holds drafts what follows the tokens."""

import random
from collections.abc import Sequence
from itertools import count

import pytest

from baton.engine.drafting.model_drafter import MAX_FIRST_TOKENS, ModelDrafter
from baton.engine.request import Chunk, ChunkResult, Computed, Drawn, NonFinite, Plan, Sample, blocks_for
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.drafts import CostlyDrafter, Offer
from tests.fixtures.growing_answer import GrowingAnswer

BLOCK, MOST, ROOM_S = 4, 3, 1.0
ANY = 10_000  # tokens


class Answer(GrowingAnswer):
    def __init__(self, tokens: int, seed: int = 0, stops: Sequence[int] = (), is_cached: bool = False) -> None:
        draw = random.Random(seed)
        self._is_cached = is_cached
        super().__init__([draw.randrange(50) for _ in range(tokens)])
        self._params = SamplingParams(max_tokens=ANY, stop_token_ids=frozenset(stops))

    def samples(self, drafted: Sequence[int] = ()) -> tuple[Sample, ...]:
        return (Sample(0, self._params),)

    def reusable_hashes(self, block_tokens: int) -> list[bytes]:
        complete = (len(self.token_ids) - 1) // block_tokens if self._is_cached else 0
        return [repr(self.token_ids[: (index + 1) * block_tokens]).encode() for index in range(complete)]


def next_token(tokens: Sequence[int]) -> int:
    return sum((place + 3) * token for place, token in enumerate(tokens)) % 50


def following(tokens: Sequence[int], most: int) -> list[int]:
    made = list(tokens)
    for _ in range(most):
        made.append(next_token(made))
    return made[len(tokens) :]


class Model:
    """Refuses to read what was not written for the sequence that it reads."""

    def __init__(self) -> None:
        self.memory: dict[tuple[int, int], list[int]] = {}  # by block and place in it: the tokens up to this one
        self.passes: list[tuple[Chunk, ...]] = []
        self.spoilt_tokens: int | None = None  # sequences of so many tokens come out not finite

    def run(self, plan: Plan) -> list[ChunkResult]:
        self.passes.append(plan.chunks)
        return [self._computed(chunk) for chunk in plan.chunks]

    def _computed(self, chunk: Chunk) -> ChunkResult:
        table = chunk.block_table
        before = list(self.memory[table[(chunk.start - 1) // BLOCK], (chunk.start - 1) % BLOCK]) if chunk.start else []
        for position in range(chunk.start):
            assert self.memory[table[position // BLOCK], position % BLOCK] == before[: position + 1], "KV of another"
        tokens = before + list(chunk.token_ids)
        for position in range(chunk.start, chunk.end):
            self.memory[table[position // BLOCK], position % BLOCK] = tokens[: position + 1]
        if chunk.end == self.spoilt_tokens:
            return NonFinite()
        return Computed(tuple(Drawn(next_token(tokens), 0.0) for _ in chunk.samples))


class Drafting:
    def __init__(self, blocks: int, most_tokens: int = ANY) -> None:
        self.model = Model()
        self.drafter = ModelDrafter(self.model.run, blocks, BLOCK, most_tokens, clock=lambda: 0.0)

    def step(self, answers: Sequence[Answer], most: int = MOST) -> list[list[int]]:
        """As a scheduler does it: catches up with those that are not known, and drafts the others."""
        offers = self.drafter.offers(answers, [most] * len(answers))
        behind = [each for each, offer in zip(answers, offers, strict=True) if offer.tokens and not offer.is_known]
        if behind:
            self.drafter.catch_up(behind, ROOM_S)
        return self.drafter.drafts_of(answers, [offer.tokens if offer.is_known else 0 for offer in offers])

    @property
    def held(self) -> int:
        self.drafter.pool.check_conservation()
        return self.drafter.pool.counts.held


def test_model_drafter_is_a_costly_drafter() -> None:
    assert isinstance(Drafting(4).drafter, CostlyDrafter)


def test_prompt_is_caught_up_with_and_then_continued() -> None:
    drafting, answer = Drafting(40), Answer(100)
    assert drafting.step([answer]) == [[]]
    assert drafting.step([answer]) == [following(answer.token_ids, MOST)]


@pytest.mark.parametrize("right", range(MOST + 1))
def test_drafts_continue_after_accepted_ones(right: int) -> None:
    drafting, answer = Drafting(10), Answer(5)
    for _ in range(6):
        [drafted] = drafting.step([answer])
        assert drafted == following(answer.token_ids, MOST)
        answer.token_ids += [*drafted[:right], 7]


def test_right_drafts_are_not_computed_again() -> None:
    drafting, answer = Drafting(10), Answer(5)
    for _ in range(4):
        [drafted] = drafting.step([answer])
        answer.token_ids += [*drafted, next_token([*answer.token_ids, *drafted])]
    firsts = [passes[0] for passes in drafting.model.passes[MOST::MOST]]
    assert [len(chunk.token_ids) for chunk in firsts] == [2, 2, 2], "the last draft and the token behind it"


def test_all_answers_of_a_step_share_its_passes() -> None:
    drafting, answers = Drafting(40), [Answer(tokens, seed) for seed, tokens in enumerate((2, 5, 7))]
    assert drafting.step(answers) == [following(answer.token_ids, MOST) for answer in answers]
    assert [len(chunks) for chunks in drafting.model.passes] == [3] * MOST


def test_draft_ends_where_the_answer_would() -> None:
    drafting, answer = Drafting(10), Answer(5)
    stop = following(answer.token_ids, 2)[1]
    assert drafting.step([Answer(5, stops=[stop])]) == [following(answer.token_ids, 2)]


def test_catching_up_is_done_in_chunks_the_oldest_answer_first() -> None:
    clock = count()  # each pass takes a second
    model = Model()
    drafter = ModelDrafter(model.run, 200, BLOCK, ANY, clock=lambda: float(next(clock)))
    drafter.measure()
    model.passes.clear()
    old, new = Answer(300), Answer(60)
    drafter.offers([old, new], [MOST, MOST])
    assert drafter.catch_up([old, new], room_s=0.5) == 0.0
    assert not model.passes
    assert drafter.catch_up([old, new], room_s=1.0) > 0.0
    [[chunk]] = model.passes
    assert chunk.token_ids == old.token_ids[:256]
    assert drafter.catch_up([old, new], room_s=1.0) > 0.0
    assert [chunk.token_ids for chunk in model.passes[1]] == [old.token_ids[256:-1], new.token_ids[:-1]]


def test_least_room_is_enough_for_more_tokens_than_an_answer_makes() -> None:
    clock, model = count(), Model()  # each pass takes a second
    drafter = ModelDrafter(model.run, 200, BLOCK, ANY, clock=lambda: float(next(clock)))
    drafter.measure()
    answer = Answer(100)
    drafter.offers([answer], [MOST])
    assert drafter.catch_up([answer], drafter.least_room_s) > 0.0
    assert len(model.passes[-1][0].token_ids) >= 8


def test_answer_that_fell_behind_catches_up_again() -> None:
    drafting, answer = Drafting(40), Answer(5)
    drafting.step([answer])
    answer.token_ids += range(MAX_FIRST_TOKENS + 3)
    assert drafting.step([answer]) == [[]]
    assert drafting.step([answer]) == [following(answer.token_ids, MOST)]


def test_blocks_are_freed_when_an_answer_ends() -> None:
    drafting, answer = Drafting(10), Answer(5)
    drafting.step([answer])
    assert drafting.held == 2
    drafting.drafter.forget(answer)
    drafting.drafter.forget(answer)
    assert drafting.held == 0


def test_waiting_answer_gives_its_blocks_to_running_ones() -> None:
    drafting = Drafting(6)
    waiting, idle, running = Answer(5, 1), Answer(5, 2), Answer(5, 3)
    drafting.step([waiting])
    drafting.step([idle])
    drafting.step([running])
    assert drafting.held == 6
    newest = Answer(5, 4)
    assert drafting.step([running, newest]) == [following(each.token_ids, MOST) for each in (running, newest)]
    computed = len(drafting.model.passes)
    drafting.step([idle])
    assert len(drafting.model.passes[computed][0].token_ids) == 1, "the one that waited longest gave its own"
    assert drafting.step([waiting]) == [following(waiting.token_ids, MOST)], "and is computed again"


def test_newest_of_a_step_gives_way_to_older_ones_and_never_the_other_way() -> None:
    drafting, old, new = Drafting(5), Answer(5, 1), Answer(5, 2)
    assert all(drafting.step([old, new]))
    old.token_ids += following(old.token_ids, 5)  # takes a block more
    new.token_ids += following(new.token_ids, 5)
    for _ in range(3):
        [of_old, of_new] = drafting.step([old, new])
        assert of_old == following(old.token_ids, MOST)
        assert of_new == []
    drafting.drafter.forget(old)
    drafting.step([new])
    assert drafting.step([new]) == [following(new.token_ids, MOST)]


@pytest.mark.parametrize(("blocks", "most_tokens"), [(3, ANY), (100, 12)])
def test_no_more_is_offered_than_pool_and_model_have_positions_for(blocks: int, most_tokens: int) -> None:
    drafting = Drafting(blocks, most_tokens)
    for tokens, offered in ((9, 3), (10, 2), (11, 1), (12, 0), (13, 0)):
        assert drafting.drafter.offers([Answer(tokens)], [MOST])[0].tokens == offered


def test_nonfinite_answer_gets_no_drafts_and_others_do() -> None:
    drafting, bad, good = Drafting(10), Answer(5, 1), Answer(6, 2)
    drafting.model.spoilt_tokens = 6  # with the second pass of the one, and the first of the other
    assert drafting.step([bad, Answer(3)]) == [[], following(Answer(3).token_ids, MOST)]
    drafting.model.spoilt_tokens = None
    assert drafting.step([bad, good]) == [[], following(good.token_ids, MOST)]
    drafting.drafter.forget(good)
    assert drafting.drafter.offers([bad], [MOST]) == [Offer(0)]


def test_nonfinite_prompt_gets_no_drafts_while_catching_up() -> None:
    drafting, answer = Drafting(10), Answer(20)
    drafting.model.spoilt_tokens = 19
    assert [drafting.step([answer]) for _ in range(3)] == [[[]]] * 3
    assert len(drafting.model.passes) == 1
    assert drafting.held == 0


def test_passes_are_measured_before_any_answer_is_here() -> None:
    drafting = Drafting(10)
    drafting.drafter.measure()
    drafting.step([Answer(5)])
    with pytest.raises(ValueError, match="before"):
        drafting.drafter.measure()


class Replaying(Model):
    """Replays passes of one token of each sequence, and computes others: at two speeds, and the time is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def run(self, plan: Plan) -> list[ChunkResult]:
        self.now_s += 0.001 if all(len(chunk.token_ids) == 1 for chunk in plan.chunks) else 0.005
        return super().run(plan)


def test_passes_are_priced_as_run() -> None:
    model = Replaying()
    drafter = ModelDrafter(model.run, 200, BLOCK, ANY, clock=lambda: model.now_s)
    drafter.measure()
    assert [drafter.seconds(answers) for answers in (1, 4, 16)] == pytest.approx([0.001] * 3)
    assert drafter.least_room_s == pytest.approx(0.005), "a part of a prompt"
    answers = [Answer(5, seed) for seed in range(4)]
    for _ in range(40):
        drafter.offers(answers, [MOST] * 4)
        for answer, drafted in zip(answers, drafter.drafts_of(answers, [MOST] * 4), strict=True):
            answer.token_ids += [*drafted, next_token([*answer.token_ids, *drafted])]
    assert drafter.seconds(4) == pytest.approx(0.001), "a first pass computes two tokens of each answer"
    assert drafter.begin_s == pytest.approx(0.004, rel=0.1)


def test_disturbed_first_pass_counts_little_and_is_forgotten_without_drafts() -> None:
    model = Replaying()
    drafter = ModelDrafter(model.run, 200, BLOCK, ANY, clock=lambda: model.now_s)
    drafter.measure()
    answer = Answer(5)
    drafter.offers([answer], [MOST])
    drafter.drafts_of([answer], [MOST])
    undisturbed_s = drafter.begin_s
    run = model.run

    def stall(plan: Plan) -> list[ChunkResult]:
        model.now_s += 2.0
        return run(plan)

    drafter._run = stall
    drafter.offers([answer], [MOST])
    drafter.drafts_of([answer], [MOST])
    assert undisturbed_s < drafter.begin_s < 0.001, "two seconds, of which a step takes one millisecond"
    for _ in range(500):
        drafter.offers([answer], [MOST])
    assert drafter.begin_s < 1e-6


def test_prefix_that_was_computed_for_another_answer_is_not_computed_again() -> None:
    drafting, first, second = Drafting(40), Answer(20, is_cached=True), Answer(20, is_cached=True)
    second.token_ids += [1, 2, 3]
    for _ in range(2):
        drafting.step([first])
    first.token_ids.append(7)
    drafting.step([first])
    computed = len(drafting.model.passes)
    assert drafting.step([second]) == [following(second.token_ids, MOST)]
    assert drafting.model.passes[computed][0].token_ids == second.token_ids[20:]
    drafting.drafter.forget(first)
    third = Answer(20, is_cached=True)
    third.token_ids += [4]
    assert drafting.step([third]) == [following(third.token_ids, MOST)], "its KV is still there"


def test_nonfinite_blocks_are_found_by_nobody() -> None:
    drafting, bad, again = Drafting(40), Answer(20, is_cached=True), Answer(20, is_cached=True)
    for _ in range(2):
        drafting.step([bad])
    bad.token_ids += [7] * 5
    drafting.model.spoilt_tokens = 25
    assert drafting.step([bad]) == [[]]
    drafting.step([again])
    assert drafting.model.passes[-1][0].token_ids == again.token_ids[:-1]


@pytest.mark.parametrize("blocks", [6, 12, 40])
def test_drafts_always_follow_the_answer_and_no_block_is_lost(blocks: int) -> None:
    """Answers come, grow, wait and end at random; some are too long for the pool."""
    draw = random.Random(blocks)
    drafting, here, seen = Drafting(blocks), list[Answer](), 0
    for number in range(1500):
        if draw.random() < 0.15 and len(here) < 6:
            tokens, is_cached = draw.choice([1, 3, 9, 30, 4 * blocks + 1]), draw.random() < 0.5
            here.append(Answer(tokens, draw.choice([number, 0]), is_cached=is_cached))
        if draw.random() < 0.08 and here:
            drafting.drafter.forget(here.pop(draw.randrange(len(here))))
        step = [answer for answer in here if draw.random() < 0.8]
        for answer, drafted in zip(step, drafting.step(step, most=draw.randint(0, 4)), strict=True):
            assert drafted == following(answer.token_ids, len(drafted))
            seen += len(drafted)
            right = draw.randint(0, len(drafted))
            answer.token_ids += [*drafted[:right], draw.randrange(50)]
        covered = sum(blocks_for(len(answer.token_ids) + 4, BLOCK) for answer in here)
        assert drafting.held <= min(blocks, covered)
    assert seen > 300
    for answer in here:
        drafting.drafter.forget(answer)
    assert drafting.held == 0
