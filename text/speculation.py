"""Request option for the number of tokens to draft. Drafting changes no token of the answer. Pure."""

from baton.text.sampling import FieldRefused

METHODS = ("ngram", "draft_model", "off")
MOST_SPECULATIVE_TOKENS = 64  # maximum drafted tokens per sequence and step that a request may set


def most_drafted(method: str, num_speculative_tokens: int | None) -> int | None:
    """Return the request's limit of drafted tokens per step; None: use the worker's. Raises: FieldRefused."""
    if method not in METHODS:
        raise FieldRefused("speculative.method", f"must be {' or '.join(METHODS)}, not {method!r}")
    if num_speculative_tokens is not None and num_speculative_tokens not in range(1, MOST_SPECULATIVE_TOKENS + 1):
        wanted = f"must be from 1 to {MOST_SPECULATIVE_TOKENS}, not {num_speculative_tokens!r}"
        raise FieldRefused("speculative.num_speculative_tokens", wanted)
    return 0 if method == "off" else num_speculative_tokens
