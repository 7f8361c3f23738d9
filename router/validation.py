"""The one validator in front of every transport: errors of a request, by field, before anything is allocated.

Pure. Lengths of repeated fields are checked before their elements are read: a million of them cost nothing.
"""

from dataclasses import dataclass

from router.chat_checks import check_chat
from router.checks import PIECE_TOKENS, check_count, check_number, check_texts, check_token_ids
from router.choosing import beam_search, best_of, choices
from router.defaults import GenerationDefaults
from router.logit_rules import MAX_BAD_WORD_BYTES, MAX_BAD_WORDS, logit_rules, min_tokens_too_many
from router.request import (
    ChatPrompt,
    GenerationRequest,
    Prompt,
    RequestedSampling,
    TextPrompt,
    TokenPrompt,
    ValidRequest,
)
from router.session_header import MAX_SESSION_CHARACTERS
from router.structured import structured_output
from service.errors import InvalidArgument

TOKEN_IDS = "token_ids.ids"
MAX_STOPS = 16
MAX_STOP_BYTES = 256
MAX_STOP_TOKEN_IDS = 64
MAX_REQUEST_ID_CHARACTERS = 128
MAX_SALT_CHARACTERS = 256
MAX_TEMPERATURE = 100.0
MAX_LOGPROBS = 20
MOST_PRIORITY = 100
MAX_TEXT_BYTES = 1 << 20
"""Of any text at once; a longer prompt is sent as token ids."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Random values for fields that a client may leave out, drawn by the caller: this module is deterministic."""

    request_id: str
    seed: int  # 64 bits


def validate(
    request: GenerationRequest, defaults: GenerationDefaults, vocab_size: int, max_model_len: int, drawn: Drawn
) -> ValidRequest:
    """Checks everything that needs no tokenizer and fills in the defaults.

    `vocab_size` is a count of ids, `max_model_len` in tokens. Raises: InvalidArgument.
    """
    sampling = request.sampling
    n, rules = choices(sampling.n), logit_rules(sampling, defaults.repetition_penalty, vocab_size)
    beams, logprobs = beam_search(sampling, n, rules), _logprobs("logprobs", sampling.logprobs)
    temperature = 0.0 if beams is not None else defaults.temperature
    stop_token_ids = _stop_token_ids(sampling, defaults, vocab_size)
    _check_length("request_id", request.request_id, MAX_REQUEST_ID_CHARACTERS)
    _check_length("cache_salt", request.cache_salt, MAX_SALT_CHARACTERS)
    return ValidRequest(
        operation=request.operation,
        prompt=_prompt(request.prompt, vocab_size, max_model_len),
        request_id=request.request_id or drawn.request_id,
        max_tokens=_max_tokens(sampling.max_tokens),
        temperature=_number("temperature", sampling.temperature, temperature, 0.0, MAX_TEMPERATURE),
        top_k=defaults.top_k if sampling.top_k is None else sampling.top_k,
        top_p=_number("top_p", sampling.top_p, defaults.top_p, 0.0, 1.0, above=True),
        min_p=_number("min_p", sampling.min_p, defaults.min_p, 0.0, 1.0),
        seed=drawn.seed if sampling.seed is None else sampling.seed,
        stop=check_texts("stop", sampling.stop, MAX_STOPS, MAX_STOP_BYTES),
        stop_token_ids=stop_token_ids,
        n=n,
        cache_salt=request.cache_salt,
        typical_p=_number("typical_p", sampling.typical_p, defaults.typical_p, 0.0, 1.0, above=True),
        rules=rules,
        bad_words=check_texts("bad_words", sampling.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_BYTES),
        logprobs=logprobs,
        prompt_logprobs=_prompt_logprobs(request, logprobs),
        best_of=best_of(sampling, n),
        beams=beams,
        structured=structured_output(sampling, stop_token_ids),
        echo=request.echo,
        priority=_priority(request.priority),
        tenant=request.tenant,
        session=_session(request.session),
        key_salt=request.key_salt,
    )


def fit_to_context(prompt_tokens: int, valid: ValidRequest, max_model_len: int) -> int:
    """Tokens per choice: as asked, or the room that the prompt leaves. Raises: InvalidArgument."""
    prompt_field, max_tokens = valid.prompt_field, valid.max_tokens
    if prompt_tokens == 0:
        raise InvalidArgument(prompt_field, "the prompt has no tokens")
    room = max_model_len - prompt_tokens
    if room < 1:
        raise prompt_too_long(prompt_field, prompt_tokens, max_model_len)
    if max_tokens is not None and max_tokens > room:
        raise InvalidArgument(
            "sampling.max_tokens",
            f"{prompt_tokens} prompt tokens leave {room} of the context's {max_model_len}, not {max_tokens}",
        )
    if valid.rules.min_tokens > room:
        raise min_tokens_too_many(valid.rules.min_tokens, room)
    return room if max_tokens is None else max_tokens


def prompt_too_long(
    prompt_field: str, prompt_tokens: int, max_model_len: int, or_more: bool = False
) -> InvalidArgument:
    """The error for a prompt that leaves no room for a single token. `or_more`: it was not counted to its end."""
    counted = f"{prompt_tokens} tokens or more" if or_more else f"{prompt_tokens} tokens"
    return InvalidArgument(
        prompt_field,
        f"{counted}; at most {max_model_len - 1} leave room for one token of the answer",
        reason="PROMPT_TOO_LONG",
        metadata={"limit": str(max_model_len - 1), "got": str(prompt_tokens)},
    )


def check_text(field: str, text: str) -> None:
    """Raises: InvalidArgument for a text over MAX_TEXT_BYTES."""
    if len(text) > MAX_TEXT_BYTES or len(text.encode()) > MAX_TEXT_BYTES:
        raise InvalidArgument(field, f"at most {MAX_TEXT_BYTES} bytes of text")


def _prompt(prompt: Prompt | None, vocab_size: int, max_model_len: int) -> Prompt:
    match prompt:
        case None:
            raise InvalidArgument("prompt", "text or token_ids is required")
        case TextPrompt(text):
            if not text:
                raise InvalidArgument("text", "the prompt is empty")
            check_text("text", text)
            return prompt
        case TokenPrompt(token_ids):
            if not token_ids:
                raise InvalidArgument("token_ids", "the prompt is empty")
            if len(token_ids) >= max_model_len:
                raise prompt_too_long("token_ids", len(token_ids), max_model_len)
            if len(token_ids) > PIECE_TOKENS:
                return prompt  # its ids are checked on a thread, by ServedModel.prepare
            return TokenPrompt(check_token_ids(TOKEN_IDS, token_ids, vocab_size))
        case ChatPrompt():
            return check_chat(prompt, MAX_TEXT_BYTES)


def _max_tokens(asked: int | None) -> int | None:
    if asked is not None and asked < 1:
        raise InvalidArgument("sampling.max_tokens", "must be at least 1")
    return asked


def _session(asked: str) -> str:
    if len(asked) > MAX_SESSION_CHARACTERS:
        raise InvalidArgument("session", f"at most {MAX_SESSION_CHARACTERS} characters")
    return asked


def _priority(asked: int) -> int:
    if not -MOST_PRIORITY <= asked <= MOST_PRIORITY:
        raise InvalidArgument("priority", f"must be from {-MOST_PRIORITY} to {MOST_PRIORITY}, not {asked}")
    return asked


def _number(name: str, asked: float | None, default: float, least: float, most: float, above: bool = False) -> float:
    return default if asked is None else check_number(name, asked, least, most, above)


def _logprobs(name: str, asked: int | None) -> int | None:
    if asked is not None and asked > MAX_LOGPROBS:
        raise InvalidArgument(f"sampling.{name}", f"at most {MAX_LOGPROBS}, not {asked}")
    return asked


def _prompt_logprobs(request: GenerationRequest, logprobs: int | None) -> int | None:
    """An echoed prompt has log-probabilities where the answer has."""
    asked = _logprobs("prompt_logprobs", request.sampling.prompt_logprobs)
    return logprobs if asked is None and request.echo else asked


def _stop_token_ids(sampling: RequestedSampling, defaults: GenerationDefaults, vocab_size: int) -> tuple[int, ...]:
    check_count("stop_token_ids", sampling.stop_token_ids, MAX_STOP_TOKEN_IDS)
    own = frozenset() if sampling.ignore_eos else defaults.eos_token_ids
    asked = check_token_ids("sampling.stop_token_ids", sampling.stop_token_ids, vocab_size)
    return tuple(sorted(own.union(asked)))


def _check_length(field: str, text: str, characters: int) -> None:
    if len(text) > characters:
        raise InvalidArgument(field, f"at most {characters} characters, not {len(text)}")
