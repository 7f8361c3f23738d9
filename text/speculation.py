"""Number of tokens to draft, as a request states it. Drafting changes no token. Pure."""

METHODS = ("ngram", "draft_model", "off")
MOST_SPECULATIVE_TOKENS = 64  # drafts per sequence and step


class SpeculationRefused(ValueError):
    """Invalid value of `field` in the public object `speculative`."""

    def __init__(self, field: str, wanted: str) -> None:
        super().__init__(f"speculative.{field}: {wanted}")
        self.field = field
        self.wanted = wanted


def most_drafted(method: str, num_speculative_tokens: int | None) -> int | None:
    """Return the maximum number of drafts per step; None: the worker's own. Raises: SpeculationRefused."""
    if method not in METHODS:
        raise SpeculationRefused("method", f"must be {' or '.join(METHODS)}, not {method!r}")
    if num_speculative_tokens is not None and num_speculative_tokens not in range(1, MOST_SPECULATIVE_TOKENS + 1):
        wanted = f"must be from 1 to {MOST_SPECULATIVE_TOKENS}, not {num_speculative_tokens!r}"
        raise SpeculationRefused("num_speculative_tokens", wanted)
    return 0 if method == "off" else num_speculative_tokens
