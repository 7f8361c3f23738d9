"""Masks of tokens equal what a brute-force check of every token allows; what is late holds nobody up."""

import json
import random
from typing import Any

import pytest
import torch

from baton.engine.request import Drawn, NonFinite, Sample
from baton.engine.sampling import constraint as constraints
from baton.engine.sampling.constraint import Constraint, Grammar
from baton.engine.sampling.mask_threads import Allowed, Mask, MaskThreads
from baton.engine.sampling.params import SamplingParams
from baton.engine.sampling.sampler import Row, sample
from baton.text.structured.library import GrammarFailed, Vocabulary, compile_form
from baton.text.structured.output import FormRefused, StructuredKind, StructuredOutput
from tests.fixtures.checkpoints import TokenizerKind, make_tokenizer
from tests.fixtures.structured_forms import FORMS, Form

TOKENS, VOCABULARY = 512, 600  # of the tokenizer, of the logits
PROMPT = (5, 6, 7)
ABC = StructuredOutput(StructuredKind.REGEX, "[abc]{4,6}")
IMPASSE = StructuredOutput(StructuredKind.GRAMMAR, 'start: "b" <|im_start|>')


class Held:
    """Runs what it is given when told to, or never."""

    def __init__(self) -> None:
        self.waiting: list[Mask] = []

    def submit(self, mask: Mask) -> None:
        self.waiting.append(mask)

    def release(self) -> None:
        for mask in self.waiting:
            mask.make()
        self.waiting.clear()


class AtOnce(Held):
    def submit(self, mask: Mask) -> None:
        mask.make()


class Words:
    """A tokenizer, and the bytes of each of its tokens as transformers would have it."""

    def __init__(self, kind: TokenizerKind) -> None:
        self.tokenizer = make_tokenizer(TOKENS, kind, 2048)
        self.end = self.tokenizer.eos_token_id
        text = self.tokenizer.backend_tokenizer.to_str()
        self.vocabulary = Vocabulary(text, VOCABULARY, [self.end])
        self.bytes = [self.vocabulary.tokenizer.decode_bytes([token_id]) for token_id in range(TOKENS)]

    def forced(self, token_ids: set[int]) -> bool:
        """Whether each of these is the beginning of the longest."""
        longest = max((self.bytes[token_id] for token_id in token_ids), key=len)
        return self.end not in token_ids and all(longest.startswith(self.bytes[token_id]) for token_id in token_ids)

    def constraint(self, output: StructuredOutput, threads: MaskThreads) -> Constraint:
        grammar = Grammar(compile_form(output, self.vocabulary), self.vocabulary)
        return Constraint(grammar, [self.end], threads)


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback"])
def words(request: pytest.FixtureRequest) -> Words:
    return Words(request.param)


@pytest.fixture(scope="module")
def level() -> Words:
    return Words("byte_level")


def allowed(constraint: Constraint, answer: list[int], choice: int = 0) -> set[int]:
    bits = constraint.mask(choice, [*PROMPT, *answer], len(PROMPT)).result().tolist()
    assert len(bits) * 8 >= VOCABULARY
    return {id for id in range(len(bits) * 8) if bits[id // 8] >> id % 8 & 1}


def test_every_token_has_the_bytes_that_the_tokenizer_makes_of_it(words: Words) -> None:
    """Between two others, since some decoders treat the beginning of a text in a way of their own."""
    [frame] = words.tokenizer.encode("b", add_special_tokens=False)[-1:]
    specials = set(words.tokenizer.all_special_ids)
    for token_id in set(range(TOKENS)) - specials - words.vocabulary.special:
        text = words.tokenizer.decode([frame, token_id, frame], skip_special_tokens=True)
        spelled = words.bytes[frame] + words.bytes[token_id] + words.bytes[frame]
        assert text.lstrip() == spelled.decode(errors="replace").lstrip(), token_id


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_mask_allows_exactly_the_tokens_that_continue_an_answer(words: Words, form: Form) -> None:
    chance = random.Random(form.name)
    texts = [id for id in range(TOKENS) if id not in words.vocabulary.special]
    constraint = words.constraint(form.output, AtOnce())
    for choice in range(8):
        answer: list[int] = []
        text = b""
        for _ in range(24):
            able = {id for id in texts if form.begins(text + words.bytes[id])}
            expected = able | ({words.end} if form.complete(text) else set())
            found = allowed(constraint, answer, choice)
            if not words.forced(expected):
                assert found == expected, text
            else:  # the same text whichever comes: the library leaves the spelling that is the tokenizer's own
                assert found and found <= expected, text
            if not able:
                break
            answer.append(chance.choice(sorted(able)))
            text += words.bytes[answer[-1]]


def test_special_tokens_and_columns_without_a_token_never_come(words: Words) -> None:
    anything = StructuredOutput(StructuredKind.REGEX, "(?s:.)*")
    every = allowed(words.constraint(anything, AtOnce()), [])
    assert every & words.vocabulary.special == {words.end}
    assert max(every) < TOKENS
    assert len(every) > TOKENS // 2


def test_grammar_that_asks_for_a_special_token_is_refused(level: Words) -> None:
    with pytest.raises(GrammarFailed, match="no token"):
        level.constraint(StructuredOutput(StructuredKind.GRAMMAR, 'start: <|im_start|> "x"'), AtOnce())


def test_answer_can_end_only_with_a_nontext_token(level: Words) -> None:
    grammar = Grammar(compile_form(ABC, level.vocabulary), level.vocabulary)
    with pytest.raises(FormRefused, match="end of sequence"):
        Constraint(grammar, [100], AtOnce())


def test_tokens_are_accepted_in_any_portions(level: Words) -> None:
    """One by one, or all at once, as after another worker has made the first or the sequence waited."""
    b = level.tokenizer.convert_tokens_to_ids("b")
    stepwise, at_once = (level.constraint(ABC, AtOnce()) for _ in range(2))
    by_steps = [allowed(stepwise, [b] * length) for length in range(7)]
    assert [allowed(at_once, [b] * length, choice=length) for length in range(7)] == by_steps
    assert by_steps[6] == {level.end}
    assert level.end not in by_steps[3] and level.end in by_steps[4]


PAIRS = "start: pair+ end\npair: head tail\nhead: /[bdgkt]/\ntail: /[aeiou]/\nend: /[.]/"
NAMES = ("the name of Badega Kufe", "tola, nomi €5", "id")
OBJECT = {"type": "object", "properties": {name: {"enum": [1, NAMES[0]]} for name in NAMES}, "required": list(NAMES)}


@pytest.mark.parametrize(
    ("output", "most_tokens"),
    [
        (StructuredOutput(StructuredKind.GRAMMAR, PAIRS), 12),
        (StructuredOutput(StructuredKind.JSON_SCHEMA, json.dumps({**OBJECT, "additionalProperties": False})), 120),
    ],
    ids=["tokens of several parts", "texts that are bound to come"],
)
def test_matcher_joining_late_allows_what_an_early_one_does(
    words: Words, output: StructuredOutput, most_tokens: int
) -> None:
    """As when an answer goes on at another worker. The one that follows knows some tokens ahead."""
    chance, long, bound = random.Random(7), 0, 0
    followed = words.constraint(output, AtOnce())
    for choice in range(4):
        answer: list[int] = []
        for _ in range(most_tokens):
            able = allowed(followed, answer, choice)
            assert allowed(words.constraint(output, AtOnce()), answer, choice) == able
            answer.append(chance.choice(sorted(able, key=lambda id: len(words.bytes[id]))[-20:]))
            if answer[-1] == words.end:
                break
            long += len(words.bytes[answer[-1]]) > 1
            bound += len(able) == 1
    assert long > 3
    assert (bound > 20) == (output.kind is StructuredKind.JSON_SCHEMA)


def params_of(words: Words, output: StructuredOutput, threads: MaskThreads, **given: Any) -> SamplingParams:
    return SamplingParams(
        max_tokens=9, stop_token_ids=frozenset({words.end}), constraint=words.constraint(output, threads), **given
    )


def row_of(params: SamplingParams, answer: tuple[int, ...] = (), choices: tuple[int, ...] = (0,)) -> Row:
    history = PROMPT + answer
    return Row(tuple(Sample(choice, params, history, len(PROMPT)) for choice in choices), len(history))


def logits_of(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(3)) * 4


def tokens(result: Any) -> list[int]:
    assert isinstance(result, tuple)
    return [drawn.token_id for drawn in result]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_sampled_and_logprobs_are_the_models(level: Words, temperature: float) -> None:
    params = params_of(level, ABC, AtOnce(), temperature=temperature, logprobs=2, seed=4)
    logits = logits_of(1)
    [result] = sample(logits, [row_of(params, choices=(0, 1, 2))])
    beginnings = {id for id in range(TOKENS) if level.bytes[id] and set(level.bytes[id]) <= set(b"abc")}
    assert set(tokens(result)) <= beginnings
    expected = logits.log_softmax(-1)[0]
    assert isinstance(result, tuple)
    for drawn in result:
        assert drawn.logprob == pytest.approx(expected[drawn.token_id].item(), abs=1e-4)
        assert [top.logprob for top in drawn.top] == pytest.approx(expected.topk(2).values.tolist(), abs=1e-4)


def test_neighbours_do_not_change_by_a_bit(level: Words) -> None:
    plain = [SamplingParams(max_tokens=9, temperature=heat, seed=2, top_p=0.9) for heat in (0.0, 0.7)]
    rows = [row_of(params) for params in plain]
    logits = logits_of(4)
    alone = sample(logits[:2], rows)
    formed = [row_of(params_of(level, ABC, AtOnce(), temperature=heat)) for heat in (0.0, 0.7)]
    assert sample(logits, rows + formed)[:2] == alone


@pytest.mark.parametrize(
    "rules", [{"min_tokens": 8}, {"bad_words": ((0,), (9,))}, {"logit_bias": {}}], ids=lambda rules: next(iter(rules))
)
def test_form_goes_before_rules_that_leave_nothing_of_it(level: Words, rules: dict[str, Any]) -> None:
    """Complete after six letters, it ends there whatever else was asked."""
    b = level.tokenizer.convert_tokens_to_ids("b")
    if "logit_bias" in rules:
        rules = {"logit_bias": {level.end: float("-inf")}}
    params = params_of(level, ABC, AtOnce(), **rules)
    assert tokens(sample(logits_of(1), [row_of(params, (b,) * 6)])[0]) == [level.end]


def test_min_tokens_puts_off_the_end_as_long_as_the_form_lets_it(level: Words) -> None:
    b = level.tokenizer.convert_tokens_to_ids("b")
    logits = logits_of(1)
    logits[0, level.end] = 90.0
    soon, late = (params_of(level, ABC, AtOnce(), min_tokens=least) for least in (0, 6))
    assert tokens(sample(logits, [row_of(soon, (b,) * 4)])[0]) == [level.end]
    assert tokens(sample(logits, [row_of(late, (b,) * 4)])[0]) != [level.end]


def test_late_mask_delays_its_row_alone(level: Words) -> None:
    b = level.tokenizer.convert_tokens_to_ids("b")
    threads = Held()
    formed = row_of(params_of(level, ABC, threads), (b,))
    plain = row_of(SamplingParams(max_tokens=9))
    logits = logits_of(2)
    late, drawn = sample(logits, [formed, plain])
    assert late is None
    assert isinstance(drawn, tuple)
    threads.release()
    again, same = sample(logits, [formed, plain])
    assert same == drawn
    assert set(level.bytes[tokens(again)[0]]) <= set(b"abc")


def never(_: Any) -> Allowed:
    raise AssertionError("nobody makes this mask")


@pytest.mark.parametrize("has_neighbours", [True, False])
def test_how_long_a_step_waits_for_masks(has_neighbours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside others a small share of what it took so far; alone until there is one."""
    waits: list[float] = []

    def waiting(masks: list[Mask], timeout_s: float, first: bool = False) -> list[Mask]:
        waits.append(timeout_s)
        return masks

    monkeypatch.setattr("baton.engine.sampling.constraint.wait", waiting)
    monkeypatch.setattr("baton.engine.sampling.constraint.time.monotonic", lambda: 50.0)
    constraints.wait_for([Mask(never, ())], constraints.StepClock(48.0), has_neighbours=has_neighbours)
    shares = [pytest.approx(2.0 * constraints.MASK_WAIT_SHARE)]
    assert waits == (shares if has_neighbours else [*shares, constraints.MASK_TIMEOUT_S])


def test_step_with_nothing_else_to_draw_waits_for_a_mask(level: Words) -> None:
    b = level.tokenizer.convert_tokens_to_ids("b")
    threads = MaskThreads(1)
    [result] = sample(logits_of(1), [row_of(params_of(level, ABC, threads), (b,))])
    threads.close()
    assert isinstance(result, tuple)


def test_form_that_cannot_be_followed_fails_alone_and_says_why(level: Words) -> None:
    b = level.tokenizer.convert_tokens_to_ids("b")
    formed = row_of(params_of(level, IMPASSE, AtOnce()), (b,))
    failed, drawn = sample(logits_of(2), [formed, row_of(SamplingParams(max_tokens=9))])
    assert isinstance(failed, NonFinite)
    assert failed.cause.endswith("no token can follow")
    assert isinstance(drawn, tuple) and isinstance(drawn[0], Drawn)
