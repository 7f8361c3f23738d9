"""The client's names of the fields in the router's errors. Pure."""

from pydantic import BaseModel

from gateway.messages.chat import ChatRequest
from gateway.messages.responses import ResponseRequest
from gateway.problem import Renamed
from gateway.requests import EFFORT
from gateway.structure import asked_forms


def names_of(message: BaseModel, renamed: Renamed) -> Renamed:
    """`renamed` for all messages of its type, and the names that this one chose of several. Raises: Problem."""
    names = dict(renamed)
    match message:
        case ChatRequest():
            names["json_schema"] = "tools"  # where no form is asked for, a function is forced
            if message.reasoning_effort is not None:
                names[f"template_options.{EFFORT}"] = "reasoning_effort"
        case ResponseRequest():
            names[f"template_options.{EFFORT}"] = "reasoning.effort"
    return names | {asked.form.kind.value: asked.field for asked in asked_forms(message)}
