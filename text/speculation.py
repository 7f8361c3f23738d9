"""What a request may say of speculative decoding: how many tokens are drafted. It changes none. Pure."""

METHODS = ("ngram", "draft_model", "off")
MOST_SPECULATIVE_TOKENS = 64  # of one answer in a step


class SpeculationRefused(ValueError):
    """`field` of the public object `speculative` has no such value."""

    def __init__(self, field: str, wanted: str) -> None:
        super().__init__(f"speculative.{field}: {wanted}")
        self.field = field
        self.wanted = wanted


def most_drafted(method: str, num_speculative_tokens: int | None) -> int | None:
    """Tokens to draft for an answer in one step; None: as many as the worker would. Raises: SpeculationRefused."""
    if method not in METHODS:
        raise SpeculationRefused("method", f"must be {' or '.join(METHODS)}, not {method!r}")
    if num_speculative_tokens is not None and num_speculative_tokens not in range(1, MOST_SPECULATIVE_TOKENS + 1):
        wanted = f"must be from 1 to {MOST_SPECULATIVE_TOKENS}, not {num_speculative_tokens!r}"
        raise SpeculationRefused("num_speculative_tokens", wanted)
    return 0 if method == "off" else num_speculative_tokens
