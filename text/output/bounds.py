"""How long a model may think, and where the form of its answer begins, as workers read it. Pure."""

from baton.text.output.formats import harmony
from baton.text.output.formats.choose import Format, Template, format_of
from baton.text.output.thoughts import CLOSE, OPEN, thoughts_of
from baton.text.structured.output import StructuredOutput
from baton.text.structured.thoughts import Thoughts

_FINAL = f"{harmony.CHANNEL}final{harmony.MESSAGE}"
_COMMENTARY = f"{harmony.CHANNEL}commentary"


class NoThoughts(ValueError):
    """The model does not think, so that nothing can bound its thoughts."""


def channels_of(template: Template | None) -> Format | None:
    """The format, where all answers are in its channels."""
    taught = format_of(template)
    return taught if taught is not None and taught.has_channels else None


def thoughts_before(
    form: StructuredOutput | None, budget: int | None, template: Template | None, ending: str
) -> Thoughts | None:
    """At most `budget` tokens, and before the form. `ending`: of the prompt. None where nothing is thought.

    Raises: NoThoughts.
    """
    if channels_of(template) is not None:
        # A call of a function ends the thought, where there is no form.
        closes = (_FINAL,) if form is not None else (_FINAL, _COMMENTARY)
        return Thoughts("", closes, f"{harmony.END}{harmony.START}assistant{_FINAL}", budget, form)
    if template is None or thoughts_of(template.source, "") is None:
        if budget:  # none at all asks a model that does not think for nothing
            raise NoThoughts("this model does not think before it answers")
        return None
    ending = ending.rstrip()
    if ending.endswith(CLOSE):
        return None
    opening = "" if ending.endswith(OPEN) else OPEN
    return Thoughts(opening, (CLOSE,), f"\n{CLOSE}", budget, form)
