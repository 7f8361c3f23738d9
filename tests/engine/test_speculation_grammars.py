"""Answers with structured output and drafts equal those without, to the last bit of every log-probability.

Greedy and sampled, with penalties and several choices, beside answers of any form; also where masks of drafts are late,
and where answers give up their KV in between.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.swap_space import SwapSpace
from baton.engine.request import Drawn, Request
from baton.engine.runner.runner import HostPool, Runner
from baton.engine.sampling.constraint import AllowedDrafts, Constraint, Grammar, StepClock
from baton.engine.sampling.mask_threads import Mask, MaskThreads
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.drafts import Drafter, PerSequenceDrafter, PromptLookup
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequences import TokenMade
from baton.engine.scheduler.speculation import DraftCandidate, SequenceDrafts, Speculated, Speculation
from baton.text.structured.library import GrammarFailed, Vocabulary, compile_form, read_vocabulary
from baton.text.structured.output import StructuredKind, StructuredOutput
from tests.engine.test_constraint import AtOnce, Held
from tests.engine.test_speculation_exactness import Knows
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.paged import PagedModel, random_prompt

BLOCK, ROOMY, TIGHT, END = 8, 320, 36, 2
SCHEMA = {
    "type": "object",
    "properties": {
        "the name of it": {"enum": ["a red one", "a green one", "another"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 9999},
        "note": {"type": "string", "maxLength": 12},
    },
    "required": ["the name of it", "count", "note"],
    "additionalProperties": False,
}
OBJECT = StructuredOutput(StructuredKind.JSON_SCHEMA, json.dumps(SCHEMA))
LETTERS = StructuredOutput(StructuredKind.REGEX, "([abc]{2}-[0-9]){4,9}")
CHOICE = StructuredOutput.choice(["yes, as ever", "no, never", "may be"])
GREEDY = SamplingParams(max_tokens=60, logprobs=2, stop_token_ids=frozenset({END}))
SAMPLED = replace(GREEDY, temperature=1.0, seed=7, logprobs=1)
PARAMS: list[tuple[StructuredOutput | None, SamplingParams]] = [
    (OBJECT, GREEDY),
    (OBJECT, replace(SAMPLED, n=3)),
    (LETTERS, SAMPLED),
    (None, SAMPLED),
    (LETTERS, replace(GREEDY, presence_penalty=0.7, min_tokens=30)),
    (CHOICE, GREEDY),
    (CHOICE, replace(SAMPLED, n=2)),
    (OBJECT, replace(SAMPLED, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.5)),
]
Answers = dict[tuple[int, int], list[Drawn]]


@pytest.fixture(scope="module")
def paged(tmp_path_factory: pytest.TempPathFactory) -> PagedModel:
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("speculation"), "llama")
    return PagedModel(checkpoint, BLOCK, ROOMY, packed=True)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    folder: Path = make_checkpoint(tmp_path_factory.mktemp("vocabulary"), "llama")
    return read_vocabulary(folder, 512, [END])


@pytest.fixture
def threads() -> Iterator[MaskThreads]:
    threads = MaskThreads(2)
    yield threads
    threads.close()


def constraint(vocabulary: Vocabulary, output: StructuredOutput, threads: MaskThreads) -> Constraint:
    return Constraint(Grammar(compile_form(output, vocabulary), vocabulary), [END], threads)


def requests(vocabulary: Vocabulary, threads: MaskThreads) -> list[Request]:
    lengths = random.Random(3)
    return [
        Request(
            number,
            tuple(random_prompt(lengths.randint(1, 40), seed=number)),
            params if output is None else replace(params, constraint=constraint(vocabulary, output, threads)),
            (),
        )
        for number, (output, params) in enumerate(PARAMS)
    ]


def answered(
    paged: PagedModel, asked: Sequence[Request], speculation: Speculation | None, at_once: int, blocks: int = ROOMY
) -> tuple[Answers, Scheduler]:
    """With `at_once` requests at a time. What is preempted comes back from host memory."""
    storage = paged.kv.data.flatten().view(torch.uint8).view(ROOMY, paged.layout.block_bytes)
    runner = Runner(paged.model, paged.layout, paged.kv, HostPool(storage, ROOMY))
    scheduler = Scheduler(BlockPool(blocks), BLOCK, 2048, 64, swap=SwapSpace(ROOMY), speculation=speculation)
    waiting, answers = list(asked), Answers()
    while True:
        while waiting and len(scheduler.batch.requests) < at_once:
            scheduler.add(waiting.pop(0))
        plan = scheduler.plan()
        if plan is None:
            return answers, scheduler
        for outcome in scheduler.commit(plan, runner.run(plan)):
            assert not hasattr(outcome, "cause"), outcome
            if isinstance(outcome, TokenMade):
                answers.setdefault((outcome.request_id, outcome.choice), []).append(outcome.drawn)
        scheduler.observe(plan, duration_s=1.0)


@pytest.fixture(scope="module")
def plain(paged: PagedModel, vocabulary: Vocabulary) -> Answers:
    threads = MaskThreads(1)
    answers, _ = answered(paged, requests(vocabulary, threads), None, at_once=1)
    threads.close()
    assert sum(map(len, answers.values())) > 200
    return answers


def knowing(plain: Answers, asked: Sequence[Request], right: float) -> Drafter:
    whole = [[*asked[number].token_ids, *[drawn.token_id for drawn in made]] for (number, _), made in plain.items()]
    return PerSequenceDrafter(lambda: Knows(whole, right))


def count_of_drafts(done: Speculated) -> tuple[int, int]:
    return done.drafted_tokens, done.accepted_tokens


@pytest.mark.parametrize("at_once", [1, 8])
@pytest.mark.parametrize("right", [1.0, 0.7, 0.0])
def test_nothing_changes_however_often_drafts_are_right(
    paged: PagedModel, vocabulary: Vocabulary, plain: Answers, threads: MaskThreads, at_once: int, right: float
) -> None:
    asked = requests(vocabulary, threads)
    speculation = Speculation(5, drafter=knowing(plain, asked, right))
    assert answered(paged, asked, speculation, at_once)[0] == plain
    drafted, accepted = count_of_drafts(speculation.done)
    assert drafted > 40
    assert accepted > (0.7 * drafted if right == 1.0 else 20)  # texts that are bound to come are right in any case


@pytest.mark.parametrize("at_once", [1, 8])
def test_nothing_changes_with_drafts_that_are_looked_up(
    paged: PagedModel, vocabulary: Vocabulary, plain: Answers, threads: MaskThreads, at_once: int
) -> None:
    speculation = Speculation(5, drafter=PerSequenceDrafter(PromptLookup))
    assert answered(paged, requests(vocabulary, threads), speculation, at_once)[0] == plain
    assert speculation.done.accepted_tokens > 20


def test_nothing_changes_when_answers_give_up_their_kv_in_between(
    paged: PagedModel, vocabulary: Vocabulary, plain: Answers, threads: MaskThreads
) -> None:
    asked = requests(vocabulary, threads)
    speculation = Speculation(5, drafter=knowing(plain, asked, 0.8))
    answers, scheduler = answered(paged, asked, speculation, at_once=8, blocks=TIGHT)
    assert answers == plain
    assert scheduler.counters.preemptions > 0
    assert speculation.done.accepted_tokens > 20


def test_nothing_changes_when_masks_are_late(
    paged: PagedModel, vocabulary: Vocabulary, plain: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any of them, and half of those of drafts; some are never made."""
    chance, held, late = random.Random(5), Held(), [0, 0]

    def waited(masks: list[Mask], clock: StepClock, has_neighbours: bool, of_drafts: Sequence[Mask] = ()) -> None:
        for mask in masks:
            if chance.random() < 0.9 or not (has_neighbours or len(masks) > 1):
                mask.make()
        if masks and not has_neighbours:
            masks[0].make()
        for mask in of_drafts:
            if chance.random() < 0.5:
                mask.make()
        for place, several in enumerate((masks, of_drafts)):
            late[place] += sum(not mask.is_ready for mask in several)

    monkeypatch.setattr("baton.engine.sampling.sampler.wait_for", waited)
    asked = requests(vocabulary, held)
    speculation = Speculation(5, drafter=knowing(plain, asked, 0.9))
    assert answered(paged, asked, speculation, at_once=8)[0] == plain
    assert min(late) > 10
    assert speculation.done.accepted_tokens > 20


def spelled(vocabulary: Vocabulary, text: str) -> list[int]:
    return vocabulary.tokenizer.tokenize_str(text)


def vetted(asked: Constraint, answer: Sequence[int], drafted: Sequence[int], most: int = 8) -> AllowedDrafts:
    return asked.vet(0, [5, *answer], 1, drafted, most)


def test_drafts_end_at_the_first_rejected_token(vocabulary: Vocabulary) -> None:
    asked = constraint(vocabulary, LETTERS, AtOnce())
    a, b, minus, digit = (spelled(vocabulary, text)[0] for text in "ab-1")
    assert vetted(asked, [a], [b, minus, digit, a, a, a]) == AllowedDrafts([b, minus, digit, a, a], 0)
    assert vetted(asked, [a], [minus]) == AllowedDrafts([], 0)
    assert vetted(asked, [a, b, minus, digit] * 4, [a, b, minus, digit, END, a]).token_ids == [a, b, minus, digit]


def test_forced_text_is_drafted_before_looked_up_text(vocabulary: Vocabulary) -> None:
    asked = constraint(vocabulary, CHOICE, AtOnce())
    yes = spelled(vocabulary, "yes, as ever")
    expected = yes[1:4]
    assert vetted(asked, yes[:1], [END, 9], most=3) == AllowedDrafts(expected, 3)
    assert vetted(asked, yes[:1], [], most=0) == AllowedDrafts([], 0)


def test_accepted_drafts_do_not_bind_their_replacement(vocabulary: Vocabulary) -> None:
    asked = constraint(vocabulary, LETTERS, AtOnce())
    a, b, minus = (spelled(vocabulary, text)[0] for text in "ab-")
    assert vetted(asked, [a, b], [minus]) == AllowedDrafts([minus], 1)
    asked.mask(1, [5, a, b], 1, drafted_tokens=1)
    assert asked.vet(1, [5, a], 1, [b], 8) == AllowedDrafts([b], 0)


def test_nothing_is_drafted_while_a_mask_is_being_made(vocabulary: Vocabulary) -> None:
    held = Held()
    asked = constraint(vocabulary, LETTERS, held)
    a = spelled(vocabulary, "a")[0]
    asked.mask(0, [5, a], 1)
    assert vetted(asked, [a], [a]) == AllowedDrafts()
    held.release()
    assert vetted(asked, [a], [a]) == AllowedDrafts([a], 0)


def test_failed_draft_leaves_the_matcher_unchanged(vocabulary: Vocabulary) -> None:
    asked = constraint(vocabulary, LETTERS, AtOnce())
    a, minus = (spelled(vocabulary, text)[0] for text in "a-")
    with pytest.raises(GrammarFailed):
        asked.mask(0, [5, a, minus], 1, drafted_tokens=1).result()
    expected = constraint(vocabulary, LETTERS, AtOnce()).mask(0, [5, a, a], 1).result()
    assert asked.mask(0, [5, a, a], 1).result().tolist() == expected.tolist()
    assert vetted(asked, [a, a], [minus, a]) == AllowedDrafts([minus], 1)


def test_forced_tokens_are_computed_despite_wrong_drafts() -> None:
    speculation = Speculation(8)
    for _ in range(10):
        for rows in range(1, 10):
            speculation.observe(rows, 0.010 + 0.002 * rows)
    drafts = SequenceDrafts()
    for _ in range(50):
        speculation.judge(drafts, 4, 0)
    assert speculation.lengths(1, [DraftCandidate(drafts, [0] * 8)], 64) == [0]
    drafts.bound = 4
    assert speculation.lengths(1, [DraftCandidate(drafts, [0] * 8)], 64) == [4]
    speculation.judge(drafts, 4, 4)
    drafts.bound = 0
    assert speculation.lengths(1, [DraftCandidate(drafts, [0] * 8)], 64) == [0], "they say nothing of other drafts"
