"""The charge of a request on a decode worker: one rule for the router that charges and the worker that lends."""

CHARGED_ANSWER_TOKENS = 256
"""An answer counts with at most so many tokens; a decode worker preempts where it grows beyond.

Most answers end long before max_tokens, which is the whole context where a client leaves it out: charged in full, a
pool would stand nearly empty.
"""


def charged_blocks(prompt_tokens: int, max_tokens: int, choices: int, block_tokens: int) -> int:
    """Complete blocks of the prompt once, and for each choice the blocks that an answer of the charged length adds."""
    shared = prompt_tokens // block_tokens
    each = -(-(prompt_tokens + min(max_tokens, CHARGED_ANSWER_TOKENS)) // block_tokens)
    return shared + choices * (each - shared)
