"""What a model may think before it answers: at most so many tokens, and a form that begins behind them. Pure.

It travels as one more kind of structured output: a worker that does not know it refuses the request by name.
"""

import json
from dataclasses import dataclass

from baton.text.structured.json_text import read_json
from baton.text.structured.output import FormRefused, StructuredKind, StructuredOutput

MAX_BUDGET = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Thoughts:
    """The texts are tokenised by themselves, special tokens included."""

    open: str  # that begins the thought, where the model does so; empty: the prompt ends within it
    closes: tuple[str, ...]  # the first of these to come ends it
    forced: str  # comes once the budget is spent; ends with one of `closes`
    budget: int | None = None  # tokens between the two
    form: StructuredOutput | None = None  # of all that follows the thought, or of an answer without one

    def output(self) -> StructuredOutput:
        form = None if self.form is None else [self.form.kind.value, self.form.text]
        stated = [self.open, self.closes, self.forced, self.budget, form]
        return StructuredOutput(StructuredKind.THOUGHTS, json.dumps(stated, ensure_ascii=False))


def thoughts_of(output: StructuredOutput) -> Thoughts:
    """Raises: FormRefused."""
    try:
        opening, closes, forced, budget, form = read_json(output.text)
        inner = None if form is None else StructuredOutput(StructuredKind(form[0]), form[1])
        found = Thoughts(opening, tuple(closes), forced, budget, inner)
        nested = inner is not None and inner.kind is StructuredKind.THOUGHTS
        good = not nested and bool(found.closes) and all(found.closes) and bool(forced)
        good = good and (budget is None or (isinstance(budget, int) and 0 <= budget <= MAX_BUDGET))
    except (ValueError, TypeError, LookupError) as error:
        raise FormRefused(f"is no description of thoughts: {error}") from error
    if not good or not any(forced.endswith(close) for close in found.closes):
        raise FormRefused("is no description of thoughts")
    return found


def form_of(output: StructuredOutput | None) -> StructuredOutput | None:
    """The form of the answer itself. Raises: FormRefused."""
    if output is None or output.kind is not StructuredKind.THOUGHTS:
        return output
    return thoughts_of(output).form
