"""The ids under which OpenAI's API gives out a request: its own id behind one of these."""

from enum import StrEnum


class AnswerId(StrEnum):
    CHAT = "chatcmpl-"
    COMPLETION = "cmpl-"
    RESPONSE = "resp_"
    MESSAGE = "msg_"


def bare_id(given: str) -> str:
    """The request's own id."""
    return next((given.removeprefix(each) for each in AnswerId if given.startswith(each)), given)
