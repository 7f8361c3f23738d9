"""How the choices are made, where each is not simply sampled: the best of several, or a beam search. Pure."""

from router.checks import check_number
from router.request import BeamSearch, BeamStop, LogitRules, RequestedSampling
from service.errors import InvalidArgument

MAX_CHOICES = 16
MAX_LENGTH_PENALTY = 10.0


def choices(asked: int | None) -> int:
    """How many are answered with. Raises: InvalidArgument."""
    return 1 if asked is None else _within("n", asked, 1)


def best_of(sampling: RequestedSampling, n: int) -> int:
    """How many choices are made. Raises: InvalidArgument."""
    return n if sampling.best_of is None else _within("best_of", sampling.best_of, n)


def beam_search(sampling: RequestedSampling, n: int, rules: LogitRules) -> BeamSearch | None:
    """Raises: InvalidArgument, naming the first field that does not go with a search, or that means nothing without.

    `rules` are those in effect, with the model's own repetition penalty.
    """
    if sampling.beam_width is None:
        if sampling.length_penalty is not None:
            raise InvalidArgument("sampling.length_penalty", "is only for a beam search: set beam_width")
        if sampling.early_stopping is not BeamStop.UNPROMISING:
            raise InvalidArgument("sampling.early_stopping", "is only for a beam search: set beam_width")
        return None
    width = _within("beam_width", sampling.beam_width, n)
    for name, foreign in (
        ("temperature", sampling.temperature is not None and sampling.temperature != 0.0),
        ("best_of", sampling.best_of is not None),
        ("stop", bool(sampling.stop)),
        ("logprobs", sampling.logprobs is not None and sampling.logprobs > 0),
        ("bad_words", bool(sampling.bad_words) or bool(rules.bad_words)),
        ("repetition_penalty", rules.repetition_penalty != 1.0),
        ("presence_penalty", rules.presence_penalty != 0.0),
        ("frequency_penalty", rules.frequency_penalty != 0.0),
        ("logit_bias", bool(rules.logit_bias)),
        ("min_tokens", rules.min_tokens > 0),
        ("allowed_token_ids", bool(rules.allowed_token_ids)),
    ):
        if foreign:
            raise InvalidArgument(f"sampling.{name}", "does not go with beam_width")
    asked = sampling.length_penalty
    penalty = 1.0 if asked is None else check_number("length_penalty", asked, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
    if sampling.early_stopping is None:
        raise InvalidArgument("sampling.early_stopping", "unknown value")
    return BeamSearch(width, penalty, sampling.early_stopping)


def _within(name: str, asked: int, least: int) -> int:
    if not least <= asked <= MAX_CHOICES:
        bounds = f"from 1 to {MAX_CHOICES}" if name == "n" else f"from n, {least}, to {MAX_CHOICES}"
        raise InvalidArgument(f"sampling.{name}", f"must be {bounds}, not {asked}")
    return asked
