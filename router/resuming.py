"""A client's report of a stream that broke, checked; and what is known of that stream. Pure.

A stream is resumed from its record in the journal where there is one: its answer may still be made by a decode worker,
and is adopted. Otherwise from the request, if the client sends it again. Either way the client's tokens do not change.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from router.checks import check_token_ids
from router.journal import Place
from router.received import Received, ReceivedChoice
from router.request import GenerationRequest, PreparedRequest
from router.validation import MAX_REQUEST_ID_CHARACTERS
from service.errors import InvalidArgument

TOKEN_CHARACTERS = 32
MAX_TEXT_BYTES_PER_TOKEN = 1 << 16  # no tokenizer has longer ones


@dataclass(frozen=True, slots=True)
class ReportedChoice:
    """Unchecked."""

    index: int
    token_ids: Sequence[int]
    text_bytes: int
    finished: bool


@dataclass(frozen=True, slots=True)
class ResumeRequest:
    """The client's message, unchecked. `request`: the original request, if the client sends it again."""

    request_id: str
    resume_token: str
    choices: Sequence[ReportedChoice] = ()
    prompt_tokens: int = 0
    request: GenerationRequest | None = None
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Resumption:
    """A stream continues behind `received`. `router_id`, `places`: the router its answer was made for, and where."""

    received: Received
    router_id: bytes = b""
    places: tuple[Place, ...] = ()

    def carried(self, request: PreparedRequest) -> dict[int, tuple[int, ...]]:
        """By choice, the tokens that the answer begins with. None of an answer that is sent only at its end: it is not
        known which of the choices that are made the client's were."""
        if not request.valid.streams:
            return {}
        return {index: choice.token_ids for index, choice in self.received.choices.items() if choice.token_ids}


def check_names(asked: ResumeRequest) -> None:
    """Raises: InvalidArgument."""
    if not 0 < len(asked.request_id) <= MAX_REQUEST_ID_CHARACTERS:
        raise InvalidArgument("request_id", f"from 1 to {MAX_REQUEST_ID_CHARACTERS} characters, as in Started")
    if len(asked.resume_token) != TOKEN_CHARACTERS:
        raise InvalidArgument("resume_token", f"{TOKEN_CHARACTERS} characters, as in Started")


def check_received(asked: ResumeRequest, request: PreparedRequest, vocab_size: int) -> Received:
    """Checked against the request. Raises: InvalidArgument."""
    n = request.valid.n
    if len(asked.choices) > n:
        raise InvalidArgument("choices", f"{len(asked.choices)} of {n}")
    if asked.prompt_tokens > len(request.token_ids):
        raise InvalidArgument("prompt_tokens", f"the prompt has {len(request.token_ids)}")
    choices: dict[int, ReceivedChoice] = {}
    for position, choice in enumerate(asked.choices):
        if choice.index >= n or choice.index in choices:
            raise InvalidArgument(f"choices[{position}].index", f"choice {choice.index} of {n}, each once")
        choices[choice.index] = _choice(f"choices[{position}]", choice, request, vocab_size)
    received = Received(choices, asked.prompt_tokens)
    if len(received.finished) == n:
        raise InvalidArgument("choices", "all of them have finished")
    return received


def without_told(request: PreparedRequest, received: Received) -> PreparedRequest:
    """Log-probabilities of a prompt that the client has all of are not computed again."""
    if received.prompt_tokens < len(request.token_ids):
        return request
    return replace(request, sampling=replace(request.sampling, prompt_logprobs=None))


def _choice(field: str, choice: ReportedChoice, request: PreparedRequest, vocab_size: int) -> ReceivedChoice:
    if len(choice.token_ids) > request.sampling.max_tokens:
        raise InvalidArgument(f"{field}.token_ids", f"more than the {request.sampling.max_tokens} tokens of an answer")
    if choice.text_bytes > MAX_TEXT_BYTES_PER_TOKEN * len(choice.token_ids):
        raise InvalidArgument(f"{field}.text_bytes", "more text than such tokens can have")
    token_ids = check_token_ids(f"{field}.token_ids", choice.token_ids, vocab_size)
    return ReceivedChoice(token_ids, choice.text_bytes, choice.finished)


def adoptable(request: PreparedRequest, resumption: Resumption) -> tuple[Place, ...]:
    """The attempts that may continue as they are; of a choice, the newest.

    An attempt's tokens begin behind those that earlier attempts had given out: a client that has fewer than those needs
    another attempt. One that wants the prompt's scores does too, since they come with the computing of the prompt.
    """
    if request.sampling.prompt_logprobs is not None:
        return ()
    places: list[Place] = []
    left = set(request.choices)
    for place in reversed(resumption.places):
        made = range(place.first_choice, place.first_choice + place.choices)
        carried_tokens = [len(resumption.received.of(choice).token_ids) for choice in made]
        if made and left.issuperset(made) and min(carried_tokens) >= place.answered_tokens:
            places.append(place)
            left.difference_update(made)
    return tuple(places)
