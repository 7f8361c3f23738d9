"""Limit on reasoning: once its token budget is spent, only the tokens that close the thought are allowed.

The state follows from an answer's tokens alone, so it does not matter which worker generated them, how often their KV
was preempted, or which drafts were tried.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch

from baton.engine.sampling.constraint import AllowedDrafts, Constraint, Grammars
from baton.engine.sampling.mask_threads import Allowed, Mask
from baton.text.structured.output import StructuredOutput
from baton.text.structured.thoughts import thoughts_of

MAX_LEAD_TOKENS = 4  # maximum tokens of white space before a thought


@dataclass(frozen=True, slots=True)
class ThoughtTokens:
    """Markers that open and close a thought, as tokens; see text/structured/thoughts.py."""

    open: tuple[int, ...]
    closes: tuple[tuple[int, ...], ...]
    forced: tuple[int, ...]
    budget: int | None


class _At(Enum):
    BEGIN = auto()  # only with structured output: a thought or the answer may begin
    THOUGHT = auto()
    SPENT = auto()  # the budget is spent: only tokens that close the thought are allowed
    ANSWER = auto()


@dataclass(frozen=True, slots=True)
class _ThoughtState:
    at: _At
    tokens: int = 0  # tokens in the opening marker (BEGIN), in the thought (THOUGHT, SPENT), before the answer (ANSWER)


class ThoughtConstraint(Constraint):
    """Constraint of a thought. `form`: constraint of the answer after it. Used only by the engine's thread."""

    def __init__(self, tokens: ThoughtTokens, vocab_size: int, form: Constraint | None) -> None:
        self._tokens = tokens
        self._form = form
        self._vocab_size = vocab_size
        self._any = Mask.of(_bits(vocab_size, slice(vocab_size)))
        self._only: dict[int, Mask] = {}
        self._either: Mask | None = None  # mask of the first token of the structured answer or of a thought
        self._ended: dict[int, int] = {}  # by choice: number of tokens before the answer
        self._searched: dict[int, int] = {}  # by choice: number of leading tokens without a closing marker

    def mask(self, choice: int, history: Sequence[int], prompt_tokens: int, drafted_tokens: int = 0) -> Mask:
        """Request the mask of the next token."""
        answer = history[prompt_tokens:]
        place = self._place(choice, answer, len(answer) - drafted_tokens)
        match place.at:
            case _At.BEGIN if place.tokens:
                return self._one(self._tokens.open[place.tokens])
            case _At.BEGIN:
                return self._thought_or_form()
            case _At.SPENT:
                return self._one(self._tokens.forced[place.tokens - (self._tokens.budget or 0)])
            case _At.ANSWER if self._form is not None:
                of_form = min(drafted_tokens, len(answer) - place.tokens)
                return self._form.mask(choice, history, prompt_tokens + place.tokens, of_form)
        return self._any

    def vet(
        self, choice: int, history: Sequence[int], prompt_tokens: int, drafted: Sequence[int], most: int
    ) -> AllowedDrafts:
        """Return the drafts up to the end of the thought or, once the budget is spent, the tokens that close it."""
        answer = list(history[prompt_tokens:])
        place = self._place(choice, answer, len(answer))
        match place.at:
            case _At.SPENT:
                forced = self._tokens.forced[place.tokens - (self._tokens.budget or 0) :][:most]
                return AllowedDrafts(forced, len(forced))
            case _At.THOUGHT:
                left = None if self._tokens.budget is None else self._tokens.budget - place.tokens
                drafts = list(drafted[:left])
                end = self._end(answer + drafts, len(answer) - place.tokens, len(answer))
                return AllowedDrafts(drafts if end is None else drafts[: end - len(answer)])
            case _At.ANSWER if self._form is None:
                return AllowedDrafts(drafted)
            case _At.ANSWER if self._form is not None and place.tokens < len(answer):
                return self._form.vet(choice, history, prompt_tokens + place.tokens, drafted, most)
        return AllowedDrafts()

    def _place(self, choice: int, answer: Sequence[int], settled: int) -> _ThoughtState:
        """Return the state after `answer`. `settled`: number of answer tokens before the drafts."""
        known = self._ended.get(choice)
        if known is not None and known <= len(answer):
            return _ThoughtState(_At.ANSWER, known)
        begin = self._begin(answer)
        if begin is None:
            if self._form is None:
                return _ThoughtState(_At.ANSWER)
            opening = self._tokens.open
            is_open = len(answer) < len(opening) and tuple(answer) == opening[: len(answer)]
            return _ThoughtState(_At.BEGIN, len(answer)) if is_open else _ThoughtState(_At.ANSWER)
        end = self._end(answer, begin, max(begin, self._searched.get(choice, 0)))
        if end is not None:
            if end <= settled:
                self._ended[choice] = end
            return _ThoughtState(_At.ANSWER, end)
        if begin <= settled:
            self._searched[choice] = settled
        tokens, budget = len(answer) - begin, self._tokens.budget
        return _ThoughtState(_At.SPENT if budget is not None and tokens >= budget else _At.THOUGHT, tokens)

    def _begin(self, answer: Sequence[int]) -> int | None:
        """Return the number of tokens up to the end of the opening marker, or None if no thought has begun."""
        opening = self._tokens.open
        for place in range(1 if self._form is not None or not opening else MAX_LEAD_TOKENS):
            if tuple(answer[place : place + len(opening)]) == opening:
                return place + len(opening)
        return None

    def _end(self, answer: Sequence[int], begin: int, start: int) -> int | None:
        """Return the number of tokens up to the thought's end, or None. `start`: no marker ends before it."""
        longest = max(map(len, self._tokens.closes))
        for place in range(max(begin, start - longest), len(answer)):
            for close in self._tokens.closes:
                if answer[place] == close[0] and tuple(answer[place : place + len(close)]) == close:
                    return place + len(close)
        return None

    def _one(self, token_id: int) -> Mask:
        if token_id not in self._only:
            self._only[token_id] = Mask.of(_bits(self._vocab_size, (token_id,)))
        return self._only[token_id]

    def _thought_or_form(self) -> Mask:
        """Return the mask of the first token of a thought or of the structured answer. Raises: GrammarFailed."""
        if self._either is None and self._form is not None:
            first = self._form.mask(0, (), 0).result()
            thought = self._one(self._tokens.open[0]).result()
            self._either = Mask.of(first | thought)
        return self._either or self._any


def thought_constraint(
    output: StructuredOutput, stop_token_ids: Iterable[int], grammars: Grammars
) -> ThoughtConstraint:
    """Create the constraint of a request that limits thoughts; blocks while a grammar is compiled.

    Raises: FormRefused, LibraryMissing.
    """
    asked = thoughts_of(output)
    form = None if asked.form is None else grammars.constraint(asked.form, stop_token_ids)
    last = next(close for close in asked.closes if asked.forced.endswith(close))
    tokens = ThoughtTokens(
        grammars.token_ids(asked.open),
        tuple(map(grammars.token_ids, asked.closes)),
        grammars.token_ids(asked.forced.removesuffix(last)) + grammars.token_ids(last),
        asked.budget,
    )
    return ThoughtConstraint(tokens, grammars.vocab_size, form)


def _bits(vocab_size: int, token_ids: Sequence[int] | slice) -> Allowed:
    """Return a mask that allows these tokens, as large as a grammar's mask. A slice is fast for many tokens."""
    bits = torch.zeros(-(-vocab_size // 32) * 32, dtype=torch.uint8)
    bits[token_ids if isinstance(token_ids, slice) else torch.tensor(token_ids)] = 1
    weights = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8)
    return (bits.view(-1, 8) * weights).sum(-1, dtype=torch.uint8)
