"""Newest prompts of each session, to find where the next prompt of a session no longer repeats an earlier one. Pure."""

from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

from baton.router.types.request import PreparedRequest

MAX_TOKENS = 1 << 22
"""Maximum number of remembered tokens, 16 MiB, and their block hashes."""
PER_SESSION = 4  # remembered prompts of a session: agents send other prompts in between
SHOWN_TOKENS = 12
_TAIL_BLOCKS = 2
"""Number of a prompt's last blocks that may differ in the next turn: templates end a prompt in another way than they
repeat an answer.
"""


class PromptChange(NamedTuple):
    """Position of the first changed token of a session's prompt, and the tokens from there on that are shown."""

    at: int
    token_ids: tuple[int, ...]


class _Known(NamedTuple):
    token_ids: "array[int]"
    block_hashes: tuple[bytes, ...]


class SessionPrompts:
    def __init__(self, most_tokens: int = MAX_TOKENS) -> None:
        self._most_tokens = most_tokens
        self._tokens = 0
        self._known: OrderedDict[tuple[str, str], deque[_Known]] = OrderedDict()

    def compare(self, prompt: PreparedRequest) -> PromptChange | None:
        """Remember the prompt. Return its change from the most similar earlier prompt of its session.

        None: the request has no session, this is its first prompt, or the prompt repeats the earlier one.
        """
        session = prompt.kept_session.name if prompt.kept_session is not None else prompt.session
        if not session:
            return None
        known = self._known.setdefault((prompt.tenant, session), deque())
        self._known.move_to_end((prompt.tenant, session))
        change = _change(known, prompt)
        self._remember(known, _Known(array("I", prompt.token_ids), prompt.block_hashes))
        return change

    def _remember(self, known: deque[_Known], prompt: _Known) -> None:
        known.append(prompt)
        self._tokens += len(prompt.token_ids)
        if len(known) > PER_SESSION:
            self._tokens -= len(known.popleft().token_ids)
        while self._tokens > self._most_tokens:
            _, oldest = self._known.popitem(last=False)
            self._tokens -= sum(len(each.token_ids) for each in oldest)


def _change(known: Sequence[_Known], prompt: PreparedRequest) -> PromptChange | None:
    if not known:
        return None
    blocks = [_common(each.block_hashes, prompt.block_hashes) for each in known]
    longest = max(blocks)
    last = next(each for each, count in zip(reversed(known), reversed(blocks), strict=True) if count == longest)
    begin = longest * prompt.block_tokens
    at = begin + _common(last.token_ids[begin:], prompt.token_ids[begin : begin + len(last.token_ids)])
    if at >= min(len(last.token_ids) - _TAIL_BLOCKS * prompt.block_tokens, len(prompt.token_ids)):
        return None
    return PromptChange(at, prompt.token_ids[at : at + SHOWN_TOKENS])


def _common(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the number of equal elements at the beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (mine, theirs) in pairs if mine != theirs), min(len(one), len(other)))
