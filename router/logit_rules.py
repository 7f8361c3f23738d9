"""Checks of the rules for logits: penalties, biases, and tokens that may or may not come. Pure."""

from collections.abc import Mapping, Sequence

from router.checks import check_count, check_number, check_token_ids
from router.request import LogitRules, RequestedSampling
from service.errors import InvalidArgument

MAX_REPETITION_PENALTY = 10.0
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_BIASES = 300
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_BAD_WORDS = 64
MAX_BAD_WORD_BYTES = 256
MAX_BAD_WORD_TOKENS = 256


def logit_rules(sampling: RequestedSampling, repetition_penalty: float, vocab_size: int) -> LogitRules:
    """The rules, without those that need a tokenizer. `repetition_penalty` is the model's. Raises: InvalidArgument."""
    asked = sampling.repetition_penalty
    return LogitRules(
        repetition_penalty=(
            repetition_penalty
            if asked is None
            else check_number("repetition_penalty", asked, 0.0, MAX_REPETITION_PENALTY, above=True)
        ),
        presence_penalty=check_number("presence_penalty", sampling.presence_penalty, -MAX_PENALTY, MAX_PENALTY),
        frequency_penalty=check_number("frequency_penalty", sampling.frequency_penalty, -MAX_PENALTY, MAX_PENALTY),
        logit_bias=_biases(sampling.logit_bias, vocab_size),
        min_tokens=_min_tokens(sampling),
        allowed_token_ids=_allowed(sampling.allowed_token_ids, vocab_size),
        bad_words=_bad_words(sampling.bad_word_token_ids, vocab_size),
    )


def check_something_is_left(rules: LogitRules, stop_token_ids: Sequence[int]) -> None:
    """Raises: InvalidArgument where every allowed token is forbidden elsewhere.

    As in transformers, a stop token alone is no bad word.
    """
    forbidden = {word[0] for word in rules.bad_words if len(word) == 1}.difference(stop_token_ids)
    if rules.min_tokens:
        forbidden.update(stop_token_ids)
    if rules.allowed_token_ids and forbidden.issuperset(rules.allowed_token_ids):
        raise InvalidArgument("sampling.allowed_token_ids", "bad_words and min_tokens exclude all of them")


def _min_tokens(sampling: RequestedSampling) -> int:
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        raise min_tokens_too_many(sampling.min_tokens, sampling.max_tokens)
    return sampling.min_tokens


def min_tokens_too_many(min_tokens: int, max_tokens: int) -> InvalidArgument:
    """The error for an answer that would have to be longer than it may be."""
    return InvalidArgument("sampling.min_tokens", f"must be at most max_tokens, {max_tokens}, not {min_tokens}")


def _biases(asked: Mapping[int, float], vocab_size: int) -> dict[int, float]:
    if len(asked) > MAX_BIASES:
        raise InvalidArgument("sampling.logit_bias", f"at most {MAX_BIASES}, not {len(asked)}")
    biases = dict(asked)
    for token_id, bias in biases.items():
        if not 0 <= token_id < vocab_size:
            raise InvalidArgument(f"sampling.logit_bias[{token_id}]", f"not a token id; they end at {vocab_size - 1}")
        check_number(f"logit_bias[{token_id}]", bias, -MAX_BIAS, MAX_BIAS)
    return biases


def _allowed(asked: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    check_count("allowed_token_ids", asked, MAX_ALLOWED_TOKEN_IDS)
    return check_token_ids("sampling.allowed_token_ids", asked, vocab_size)


def _bad_words(asked: Sequence[Sequence[int]], vocab_size: int) -> tuple[tuple[int, ...], ...]:
    check_count("bad_word_token_ids", asked, MAX_BAD_WORDS)
    words: list[tuple[int, ...]] = []
    for index, token_ids in enumerate(asked):
        name = f"bad_word_token_ids[{index}].ids"
        if not token_ids:
            raise InvalidArgument(f"sampling.{name}", "is empty")
        check_count(name, token_ids, MAX_BAD_WORD_TOKENS)
        words.append(check_token_ids(f"sampling.{name}", token_ids, vocab_size))
    return tuple(words)
