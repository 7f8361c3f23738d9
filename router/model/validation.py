"""Validation of requests from gRPC and HTTP. Errors name the invalid field. Pure.

Lengths of repeated fields are checked before their elements are read, so that a million elements cost nothing.
"""

import re
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from baton.process.errors import InvalidArgument
from baton.process.foreign_text import MAX_ID_CHARACTERS, identifier_fault
from baton.process.objectives import LEAST_SLO_MS, MOST_SLO_MS
from baton.router.model.defaults import GenerationDefaults
from baton.router.types.request import (
    MAX_SESSION_CHARACTERS,
    AnyPrompt,
    ChatPrompt,
    GenerationRequest,
    LogitRules,
    Message,
    PairPrompt,
    RequestedSampling,
    Sampling,
    TextPrompt,
    TokenPrompt,
    ValidRequest,
)
from baton.router.types.session import KeptSession, kept_session
from baton.text.sampling import (
    BIASES,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_STOP_TOKEN_IDS,
    NUMBERS,
    BeamParams,
    BeamStop,
    FieldRefused,
    SamplingNumbers,
    check_alone,
    check_choices,
    long_prompt_fault,
    most_prompt_tokens,
    numbers_of,
)
from baton.text.speculation import most_drafted
from baton.text.structured.output import FormRefused, StructuredOutput, enforceable_form
from baton.text.structured.thoughts import form_of

PIECE_TOKENS = 1 << 12
TOKEN_IDS = "token_ids.ids"
MAX_TEXT_BYTES = 1 << 20
"""Maximum bytes of any text; a longer prompt is sent as token ids."""
MAX_SALT_CHARACTERS = 256
MOST_PRIORITY = 100
MOST_KEEP_FOR_S = 86_400
MAX_MESSAGES = 4096
MAX_ROLE_CHARACTERS = 64
MAX_TOOLS = 1024
MAX_TOOL_NAME_CHARACTERS = 64
TOOL_NAME = re.compile(r"[\w.:-]+", re.ASCII)  # OpenAI's characters, and `.` and `:` for prefixed names
MAX_STOPS = 16
MAX_STOP_BYTES = 256
MAX_BAD_WORD_BYTES = 256


@dataclass(frozen=True, slots=True)
class DrawnValues:
    """Random values for omitted fields, drawn by the caller so that validation is deterministic."""

    request_id: str
    seed: int  # random, 64 bits


@contextmanager
def sampling_fields() -> Iterator[None]:
    """Convert FieldRefused, raised in the context, to InvalidArgument for a field of `sampling`."""
    try:
        yield
    except FieldRefused as refusal:
        raise InvalidArgument(f"sampling.{refusal.field}", refusal.fault) from refusal


@sampling_fields()
def validate(
    request: GenerationRequest, defaults: GenerationDefaults, vocab_size: int, max_model_len: int, drawn: DrawnValues
) -> ValidRequest:
    """Check everything that needs no tokenizer, and fill in the values of omitted fields. Raises: InvalidArgument."""
    sampling = request.sampling
    n = 1 if sampling.n is None else check_choices("n", sampling.n, 1, MAX_CHOICES)
    resolved, rules = _numbers(sampling, defaults), _logit_rules(sampling, vocab_size)
    beams, logprobs = _beam_search(sampling, n, resolved, rules), _logprobs("logprobs", sampling.logprobs)
    stop_token_ids = _stop_token_ids(sampling, defaults, vocab_size)
    prompt_logprobs = _logprobs("prompt_logprobs", sampling.prompt_logprobs)
    if prompt_logprobs is None and request.echo:
        prompt_logprobs = logprobs  # an echoed prompt gets log-probabilities if the answer gets them
    _check_fields(request)
    best_of = n if sampling.best_of is None else check_choices("best_of", sampling.best_of, n, MAX_CHOICES)
    numbers = resolved if beams is None else replace(resolved, temperature=0.0)
    return ValidRequest(
        operation=request.operation,
        prompt=_prompt(request.prompt, vocab_size, max_model_len, pooled=request.pooling is not None),
        request_id=request.request_id or drawn.request_id,
        sampling=Sampling(
            max_tokens=max_model_len if sampling.max_tokens is None else sampling.max_tokens,
            **numbers_of(numbers),
            seed=drawn.seed if sampling.seed is None else sampling.seed,
            stop_token_ids=stop_token_ids,
            n=best_of,
            rules=rules,
            logprobs=0 if logprobs is None and best_of > n else logprobs,  # best_of ranks answers by them
            prompt_logprobs=prompt_logprobs,
            beams=beams,
            structured=_structured_output(sampling, stop_token_ids),
            most_drafted=None if sampling.speculative is None else most_drafted(*sampling.speculative),
        ),
        is_bounded=sampling.max_tokens is not None and not sampling.is_clamped,
        stop=_texts("stop", sampling.stop, MAX_STOPS, MAX_STOP_BYTES),
        n=n,
        cache_salt=request.cache_salt,
        bad_words=_texts("bad_words", sampling.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_BYTES),
        logprobs=logprobs,
        echo=request.echo,
        priority=request.priority,
        tenant=request.tenant,
        session=request.session,
        kept_session=_kept_session(request),
        key_salt=request.key_salt,
        pooling=request.pooling,
        own_form=request.own_form,
        is_streamed=request.is_streamed,
    )


def fit_to_context(prompt_tokens: int, valid: ValidRequest, max_model_len: int) -> int:
    """Return max_tokens per choice: as requested, at most the context length minus the prompt's tokens.

    Raises: InvalidArgument if prompt and answer do not fit into the context.
    """
    prompt_field, sampling = valid.prompt_field, valid.sampling
    if prompt_tokens == 0:
        raise InvalidArgument(prompt_field, "the prompt has no tokens")
    room = max_model_len - prompt_tokens
    pooled = valid.pooling is not None
    if room < (not pooled):
        raise prompt_too_long(prompt_field, prompt_tokens, max_model_len, pooled=pooled)
    if pooled:
        return 1  # placeholder: nothing is generated
    if valid.is_bounded and sampling.max_tokens > room:
        raise InvalidArgument(
            "sampling.max_tokens",
            f"{sampling.max_tokens} exceeds the {room} tokens that {prompt_tokens} prompt tokens leave of the context "
            f"of {max_model_len}",
        )
    if sampling.min_tokens > room:
        raise _min_tokens_too_many(sampling.min_tokens, f"{room}, the rest of the context")
    return min(sampling.max_tokens, room)


def prompt_too_long(
    prompt_field: str, prompt_tokens: int, max_model_len: int, or_more: bool = False, pooled: bool = False
) -> InvalidArgument:
    """Return the error for a prompt that exceeds the context. One token is reserved for an answer unless `pooled`.

    `or_more`: `prompt_tokens` is a lower bound.
    """
    return InvalidArgument(
        prompt_field,
        long_prompt_fault(prompt_tokens, max_model_len, pooled, or_more),
        reason="PROMPT_TOO_LONG",
        metadata={"limit": str(most_prompt_tokens(max_model_len, pooled)), "got": str(prompt_tokens)},
    )


def check_something_is_left(sampling: Sampling) -> None:
    """Check that bad_words and min_tokens do not forbid all of allowed_token_ids. Raises: InvalidArgument.

    As in transformers, a bad word that is only a stop token is ignored.
    """
    rules = sampling.rules
    forbidden = {word[0] for word in rules.bad_words if len(word) == 1}.difference(sampling.stop_token_ids)
    if sampling.min_tokens:
        forbidden.update(sampling.stop_token_ids)
    if rules.allowed_token_ids and forbidden.issuperset(rules.allowed_token_ids):
        raise InvalidArgument("sampling.allowed_token_ids", "bad_words and min_tokens forbid all of them")


def _min_tokens_too_many(min_tokens: int, limit: str) -> InvalidArgument:
    """Return the error for min_tokens that exceeds a limit. `limit`: in words."""
    return InvalidArgument("sampling.min_tokens", f"must be at most {limit}, not {min_tokens}")


def check_text(field: str, text: str) -> None:
    """Check the size of a text. Raises: InvalidArgument for more than MAX_TEXT_BYTES."""
    if len(text) > MAX_TEXT_BYTES or len(text.encode()) > MAX_TEXT_BYTES:
        raise InvalidArgument(field, f"exceeds {MAX_TEXT_BYTES} bytes of text")


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int, first: int = 0) -> tuple[int, ...]:
    """Return the ids as a tuple. Raises: InvalidArgument naming the first invalid id by its index.

    `first`: index of the first id in the field.
    """
    checked = tuple(token_ids)
    if checked and not 0 <= min(checked) <= max(checked) < vocab_size:
        index = next(i for i, token_id in enumerate(checked) if not 0 <= token_id < vocab_size)
        raise InvalidArgument(
            f"{field}[{first + index}]", f"{checked[index]} is not a token id; they end at {vocab_size - 1}"
        )
    return checked


def check_long_prompt(field: str, token_ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """Check token ids on another thread, in pieces of under 1 ms, so that streams continue. Raises: InvalidArgument."""
    checked: list[int] = []
    for begin in range(0, len(token_ids), PIECE_TOKENS):
        checked += check_token_ids(field, token_ids[begin : begin + PIECE_TOKENS], vocab_size, begin)
    return tuple(checked)


def _check_fields(request: GenerationRequest) -> None:
    """Check salt, ids, sessions, priority, objectives and max_tokens. Raises: InvalidArgument."""
    if len(request.cache_salt) > MAX_SALT_CHARACTERS:
        raise InvalidArgument("cache_salt", f"at most {MAX_SALT_CHARACTERS} characters, not {len(request.cache_salt)}")
    for field, text, characters in (
        ("request_id", request.request_id, MAX_ID_CHARACTERS),
        ("session", request.session, MAX_SESSION_CHARACTERS),
        ("session_id", request.session_id, MAX_SESSION_CHARACTERS),
    ):
        if fault := identifier_fault(text, characters):
            raise InvalidArgument(field, fault)
    if not -MOST_PRIORITY <= request.priority <= MOST_PRIORITY:
        raise InvalidArgument("priority", f"must be from {-MOST_PRIORITY} to {MOST_PRIORITY}, not {request.priority}")
    for name in ("ttft_slo_ms", "tbt_slo_ms"):
        slo_ms = getattr(request.objectives, name)
        if slo_ms is not None and not LEAST_SLO_MS <= slo_ms <= MOST_SLO_MS:  # rejects NaN, too
            raise InvalidArgument(name, f"must be from {LEAST_SLO_MS:.0f} to {MOST_SLO_MS:.0f} ms, not {slo_ms:g}")
    if request.sampling.max_tokens is not None and request.sampling.max_tokens < 1:
        raise InvalidArgument("sampling.max_tokens", "must be at least 1")


def _kept_session(request: GenerationRequest) -> KeptSession | None:
    """Return how long the session's KV is retained; None without session_id. Raises: InvalidArgument."""
    keep_for_s = request.keep_for_s
    if keep_for_s is not None and not 0 <= keep_for_s <= MOST_KEEP_FOR_S:  # rejects NaN, too
        raise InvalidArgument("keep_for_s", f"must be from 0 to {MOST_KEEP_FOR_S} seconds, not {keep_for_s:g}")
    if not request.session_id:
        for field, given in (("keep_for_s", keep_for_s is not None), ("done", request.done)):
            if given:
                raise InvalidArgument(field, "needs session_id")
    caller = (request.tenant, request.key_salt)
    return kept_session(request.session_id, *caller, request.cache_salt, keep_for_s, request.done)


def _prompt(prompt: AnyPrompt | None, vocab_size: int, max_model_len: int, pooled: bool) -> AnyPrompt:
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
            if len(token_ids) >= max_model_len + pooled:
                raise prompt_too_long("token_ids", len(token_ids), max_model_len, pooled=pooled)
            if len(token_ids) > PIECE_TOKENS:
                return prompt  # ServedModel.prepare checks the ids of a long prompt, on a thread
            return TokenPrompt(check_token_ids(TOKEN_IDS, token_ids, vocab_size))
        case ChatPrompt():
            return check_chat(prompt, MAX_TEXT_BYTES)
        case PairPrompt(query, document):
            if not query or not document:
                raise InvalidArgument("text", "the query or the document is empty")
            check_text("text", query)
            check_text("text", document)
            return prompt


def check_chat(prompt: ChatPrompt, max_text_bytes: int) -> ChatPrompt:
    """Return the chat with checked messages and tools. Raises: InvalidArgument.

    `max_text_bytes`: maximum size of all messages together, and of all tools together.
    """
    return replace(
        prompt, messages=_messages(prompt.messages, max_text_bytes), tools=_tools(prompt.tools, max_text_bytes)
    )


def _messages(messages: Sequence[Message], max_text_bytes: int) -> tuple[Message, ...]:
    if not messages:
        raise InvalidArgument("messages", "at least one message is needed")
    if len(messages) > MAX_MESSAGES:
        raise InvalidArgument("messages", f"at most {MAX_MESSAGES} messages, not {len(messages)}")
    checked = tuple(messages)
    for index, message in enumerate(checked):
        if not message.role:
            raise InvalidArgument(f"messages[{index}].role", "is empty")
        if len(message.role) > MAX_ROLE_CHARACTERS:
            raise InvalidArgument(
                f"messages[{index}].role", f"at most {MAX_ROLE_CHARACTERS} characters, not {len(message.role)}"
            )
    if sum(map(_text_bytes, checked)) > max_text_bytes:
        raise InvalidArgument("messages", f"at most {max_text_bytes} bytes of text in all")
    return checked


def _text_bytes(message: Message) -> int:
    texts = [message.content, message.name, message.tool_call_id, message.reasoning]
    for call in message.tool_calls:
        texts += [call.call_id, call.name, call.arguments]
    return sum(len(text.encode()) for text in texts)


def _tools(tools: Sequence[Mapping[str, Any]], max_text_bytes: int) -> tuple[Mapping[str, Any], ...]:
    if len(tools) > MAX_TOOLS:
        raise InvalidArgument("tools", f"at most {MAX_TOOLS} tools, not {len(tools)}")
    checked, names = tuple(tools), set[str]()
    for index, tool in enumerate(checked):
        name, field = tool.get("function", {}).get("name", ""), f"tools[{index}].function.name"
        if not 0 < len(name) <= MAX_TOOL_NAME_CHARACTERS:
            raise InvalidArgument(field, f"must have 1 to {MAX_TOOL_NAME_CHARACTERS} characters, not {len(name)}")
        if not TOOL_NAME.fullmatch(name):
            raise InvalidArgument(field, f"may only have letters, digits, '_', '-', '.' and ':', not {name!r}")
        if name in names:
            raise InvalidArgument(field, f"another tool has the name {name!r}, too")
        names.add(name)
    if sum(len(str(tool)) for tool in checked) > max_text_bytes:
        raise InvalidArgument("tools", f"at most {max_text_bytes} bytes in all")
    return checked


def _numbers(sampling: RequestedSampling, defaults: SamplingNumbers) -> SamplingNumbers:
    """Return the requested sampling numbers, and the model's defaults for omitted ones. Raises: InvalidArgument."""
    asked = dict(sampling.numbers)
    for name, value in asked.items():
        NUMBERS[name].range.check(name, value)
    min_tokens = sampling.numbers.get("min_tokens", 0)
    if sampling.max_tokens is not None and min_tokens > sampling.max_tokens:
        raise _min_tokens_too_many(int(min_tokens), f"max_tokens, {sampling.max_tokens}")
    return SamplingNumbers(**numbers_of(defaults) | asked)


def _logit_rules(sampling: RequestedSampling, vocab_size: int) -> LogitRules:
    """Return the logit rules, except bad words that need the tokenizer. Raises: InvalidArgument."""
    return LogitRules(
        logit_bias=_biases(sampling.logit_bias, vocab_size),
        allowed_token_ids=_token_ids(
            "allowed_token_ids", sampling.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS, vocab_size
        ),
        bad_words=_bad_words(sampling.bad_word_token_ids, vocab_size),
    )


def _biases(asked: Mapping[int, float], vocab_size: int) -> dict[int, float]:
    _check_count("logit_bias", asked, MAX_BIASES)
    biases = dict(asked)
    for token_id, bias in biases.items():
        if not 0 <= token_id < vocab_size:
            raise InvalidArgument(f"sampling.logit_bias[{token_id}]", f"not a token id; they end at {vocab_size - 1}")
        BIASES.check(f"logit_bias[{token_id}]", bias)
    return biases


def _bad_words(asked: Sequence[Sequence[int]], vocab_size: int) -> tuple[tuple[int, ...], ...]:
    _check_count("bad_word_token_ids", asked, MAX_BAD_WORDS)
    words: list[tuple[int, ...]] = []
    for index, token_ids in enumerate(asked):
        name = f"bad_word_token_ids[{index}].ids"
        if not token_ids:
            raise InvalidArgument(f"sampling.{name}", "is empty")
        words.append(_token_ids(name, token_ids, MAX_BAD_WORD_TOKENS, vocab_size))
    return tuple(words)


def _beam_search(
    sampling: RequestedSampling, n: int, resolved: SamplingNumbers, rules: LogitRules
) -> BeamParams | None:
    """Return the checked parameters of a beam search; None without beam_width.

    `resolved`: sampling numbers, including the model's defaults. Raises: InvalidArgument for fields that require or
    exclude a beam search.
    """
    if sampling.beam_width is None:
        if sampling.length_penalty is not None:
            raise InvalidArgument("sampling.length_penalty", "is only for a beam search: set beam_width")
        if sampling.early_stopping is not BeamStop.UNPROMISING:
            raise InvalidArgument("sampling.early_stopping", "is only for a beam search: set beam_width")
        return None
    width = check_choices("beam_width", sampling.beam_width, n, MAX_CHOICES)
    others = (
        ("temperature", sampling.numbers.get("temperature", 0.0) != 0.0),
        ("best_of", sampling.best_of is not None),
        ("stop", bool(sampling.stop)),
        ("logprobs", sampling.logprobs is not None and sampling.logprobs > 0),
        ("bad_words", bool(sampling.bad_words) or bool(rules.bad_words)),
        ("repetition_penalty", resolved.repetition_penalty != 1.0),
        ("presence_penalty", resolved.presence_penalty != 0.0),
        ("frequency_penalty", resolved.frequency_penalty != 0.0),
        ("logit_bias", bool(rules.logit_bias)),
        ("min_tokens", resolved.min_tokens > 0),
        ("allowed_token_ids", bool(rules.allowed_token_ids)),
    )
    check_alone("beam_width", others)
    penalty = 1.0 if sampling.length_penalty is None else sampling.length_penalty
    if sampling.early_stopping is None:
        raise InvalidArgument("sampling.early_stopping", "unknown value")
    return BeamParams(width, penalty, sampling.early_stopping)


def _structured_output(sampling: RequestedSampling, stop_token_ids: Sequence[int]) -> StructuredOutput | None:
    """Return the requested structured output, converted to an enforceable form. Raises: InvalidArgument.

    Only checks that need no compilation are done here.
    """
    whole = sampling.structured
    try:
        asked = form_of(whole)
    except FormRefused as refusal:
        raise InvalidArgument("sampling.thinking_budget", str(refusal)) from refusal
    if asked is None:
        return whole
    others = (
        ("ignore_eos", sampling.ignore_eos),
        ("beam_width", sampling.beam_width is not None),
        ("allowed_token_ids", bool(sampling.allowed_token_ids)),
    )
    check_alone(asked.kind.value, others)
    if not stop_token_ids:
        raise InvalidArgument(asked.field, "needs an end-of-sequence token, which this model lacks")
    try:
        held = enforceable_form(asked)
    except FormRefused as refusal:
        raise InvalidArgument(asked.field, str(refusal)) from refusal
    return held if asked is whole else whole  # otherwise `whole` contains `asked`, already converted


def _stop_token_ids(sampling: RequestedSampling, defaults: GenerationDefaults, vocab_size: int) -> tuple[int, ...]:
    asked = _token_ids("stop_token_ids", sampling.stop_token_ids, MAX_STOP_TOKEN_IDS, vocab_size)
    own = () if sampling.ignore_eos else (each for each in defaults.eos_token_ids if each < vocab_size)
    return tuple(sorted({*own, *asked}))


def _logprobs(name: str, asked: int | None) -> int | None:
    if asked is not None and asked > MAX_LOGPROBS:
        raise InvalidArgument(f"sampling.{name}", f"at most {MAX_LOGPROBS}, not {asked}")
    return asked


def _texts(name: str, texts: Sequence[str], most: int, most_bytes: int) -> tuple[str, ...]:
    """Return the texts of a sampling field. Raises: InvalidArgument for too many, empty or too long texts."""
    _check_count(name, texts, most)
    checked = tuple(texts)
    for index, text in enumerate(checked):
        if not text:
            raise InvalidArgument(f"sampling.{name}[{index}]", "is empty")
        if len(text.encode()) > most_bytes:
            raise InvalidArgument(f"sampling.{name}[{index}]", f"at most {most_bytes} bytes")
    return checked


def _token_ids(name: str, asked: Sequence[int], most: int, vocab_size: int) -> tuple[int, ...]:
    """Check the number and values of the token ids of a sampling field. Raises: InvalidArgument."""
    _check_count(name, asked, most)
    return check_token_ids(f"sampling.{name}", asked, vocab_size)


def _check_count(name: str, values: Sized, most: int) -> None:
    """Check the number of values of a sampling field without reading them. Raises: InvalidArgument."""
    if len(values) > most:
        raise InvalidArgument(f"sampling.{name}", f"at most {most}, not {len(values)}")
