"""Limit of the reasoning tokens before an answer, and structured output of the answer. Pure.

In messages between processes, limit and structured output together are a separate kind of structured output, which
older workers reject as unknown.
"""

import json
from dataclasses import dataclass

from baton.text.structured.json_text import read_json
from baton.text.structured.output import FormRefused, StructuredKind, StructuredOutput

MAX_BUDGET = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Thoughts:
    """Rules for the reasoning before an answer. Each tag is tokenised separately and may contain special tokens."""

    open: str  # tag that begins the reasoning; empty if the prompt ends within the reasoning
    closes: tuple[str, ...]  # tags that end the reasoning, whichever comes first
    forced: str  # text forced when the budget is used up; ends with one of `closes`
    budget: int | None = None  # maximum number of tokens between the tags
    form: StructuredOutput | None = None  # structured output of the answer

    def output(self) -> StructuredOutput:
        form = None if self.form is None else [self.form.kind.value, self.form.text]
        stated = [self.open, self.closes, self.forced, self.budget, form]
        return StructuredOutput(StructuredKind.THOUGHTS, json.dumps(stated, ensure_ascii=False))


def thoughts_of(output: StructuredOutput) -> Thoughts:
    """Parse the reasoning rules from `output`, whose kind must be THOUGHTS. Raises: FormRefused."""
    try:
        opening, closes, forced, budget, form = read_json(output.text)
        inner = None if form is None else StructuredOutput(StructuredKind(form[0]), form[1])
        found = Thoughts(opening, tuple(closes), forced, budget, inner)
        nested = inner is not None and inner.kind is StructuredKind.THOUGHTS
        good = not nested and bool(found.closes) and all(found.closes) and bool(forced)
        good = good and (budget is None or (isinstance(budget, int) and 0 <= budget <= MAX_BUDGET))
    except (ValueError, TypeError, LookupError) as error:
        raise FormRefused(f"invalid reasoning configuration: {error}") from error
    if not good or not any(forced.endswith(close) for close in found.closes):
        raise FormRefused("invalid reasoning configuration")
    return found


def form_of(output: StructuredOutput | None) -> StructuredOutput | None:
    """Return the structured output of the answer itself, without the reasoning. Raises: FormRefused."""
    if output is None or output.kind is not StructuredKind.THOUGHTS:
        return output
    return thoughts_of(output).form
