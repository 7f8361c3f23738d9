"""Limit of reasoning tokens, and start of structured output, in the form that workers read. Pure."""

from baton.text.output.formats import harmony
from baton.text.output.formats.choose import Format, Template, format_of
from baton.text.output.thoughts import CLOSE, OPEN, thoughts_of
from baton.text.structured.output import StructuredOutput
from baton.text.structured.thoughts import Thoughts

_FINAL = f"{harmony.CHANNEL}final{harmony.MESSAGE}"
_COMMENTARY = f"{harmony.CHANNEL}commentary"


class NoThoughts(ValueError):
    """A limit for a model that does not reason."""


def channels_of(template: Template | None) -> Format | None:
    """Return the format if all its answers are in channels."""
    taught = format_of(template)
    return taught if taught is not None and taught.has_channels else None


def thoughts_before(
    form: StructuredOutput | None, budget: int | None, template: Template | None, ending: str
) -> Thoughts | None:
    """Return at most `budget` tokens of reasoning before the form; None if the answer has no reasoning.

    `ending`: end of the prompt. Raises: NoThoughts.
    """
    if channels_of(template) is not None:
        # Without a form, a call of a function ends the reasoning.
        closes = (_FINAL,) if form is not None else (_FINAL, _COMMENTARY)
        return Thoughts("", closes, f"{harmony.END}{harmony.START}assistant{_FINAL}", budget, form)
    if template is None or thoughts_of(template.source, "") is None:
        if budget:  # a budget of 0 suits a model that does not reason
            raise NoThoughts("this model does not reason before it answers")
        return None
    ending = ending.rstrip()
    if ending.endswith(CLOSE):
        return None
    opening = "" if ending.endswith(OPEN) else OPEN
    return Thoughts(opening, (CLOSE,), f"\n{CLOSE}", budget, form)
