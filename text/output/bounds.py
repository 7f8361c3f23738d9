"""Limit on reasoning tokens, and structured output after the reasoning, as workers enforce them. Pure."""

from baton.text.output.formats import harmony
from baton.text.output.formats.choose import Format, Template, format_of
from baton.text.output.thoughts import CLOSE, OPEN, thoughts_of
from baton.text.structured.output import StructuredOutput
from baton.text.structured.thoughts import Thoughts

_FINAL = f"{harmony.CHANNEL}final{harmony.MESSAGE}"
_COMMENTARY = f"{harmony.CHANNEL}commentary"


class NoThoughts(ValueError):
    """Error: the request limits the reasoning of a model that does not reason."""


def channels_of(template: Template | None) -> Format | None:
    """Return the model's format if it puts all answers into channels, otherwise None."""
    taught = format_of(template)
    return taught if taught is not None and taught.has_channels else None


def thoughts_before(
    form: StructuredOutput | None, budget: int | None, template: Template | None, ending: str
) -> Thoughts | None:
    """Return the rules for the reasoning before the answer; None if the answer has no reasoning.

    `form`: structured output of the answer. `budget`: maximum number of reasoning tokens. `ending`: end of the prompt.
    Raises: NoThoughts.
    """
    if channels_of(template) is not None:
        # Without structured output, a function call may end the reasoning too.
        closes = (_FINAL,) if form is not None else (_FINAL, _COMMENTARY)
        return Thoughts("", closes, f"{harmony.END}{harmony.START}assistant{_FINAL}", budget, form)
    if template is None or thoughts_of(template.source, "") is None:
        if budget:  # a budget of 0 is fine for a model that does not reason
            raise NoThoughts("this model does not reason before it answers")
        return None
    ending = ending.rstrip()
    if ending.endswith(CLOSE):
        return None
    opening = "" if ending.endswith(OPEN) else OPEN
    return Thoughts(opening, (CLOSE,), f"\n{CLOSE}", budget, form)
