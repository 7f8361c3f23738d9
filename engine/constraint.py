"""Which tokens may come next in an answer that is held to a form. Masks are made on threads, beside the forward pass.

A choice's matcher only follows its tokens: what it knows can be found again from them. So it does not matter where they
were made, nor how often their KV was given up in between.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy
import numpy.typing
import torch

from engine.mask_threads import Allowed, Mask, wait
from structured.library import GrammarFailed, Matcher, Vocabulary, fill_next_tokens, forced_tokens, take_tokens

Bits = numpy.typing.NDArray[numpy.uint8]
NEIGHBOURS_SHARE = 0.03  # of the time since a step began: how much longer it may take for the sake of a mask
PATIENCE_S = 30.0  # of a step that has nothing else to draw


class Threads(Protocol):
    """What MaskThreads are to a constraint."""

    def submit(self, mask: Mask) -> None: ...


class Grammar:
    """A form, compiled for one vocabulary. Shared by all requests that ask for it; never changed."""

    def __init__(self, matcher: Matcher, vocabulary: Vocabulary) -> None:
        """`matcher` stands before the first token. Computes the mask of that."""
        self.vocabulary = vocabulary
        self._matcher = matcher
        self._texts = ~self.bits(vocabulary.special) & self.bits(slice(vocabulary.size))
        self._first = self._make(matcher, self.empty())
        self._may_be_empty = matcher.is_accepting()

    def matcher(self) -> Matcher:
        """One of its own for an answer."""
        return self._matcher.deep_copy()

    def empty(self) -> Allowed:
        """Memory for a mask, as large as the library would have it."""
        return torch.zeros(-(-self.vocabulary.size // 32) * 4, dtype=torch.uint8)

    def bits(self, token_ids: Iterable[int] | slice) -> Bits:
        one_each = numpy.zeros(8 * len(self.empty()), numpy.bool_)
        one_each[token_ids if isinstance(token_ids, slice) else list(token_ids)] = True
        return numpy.packbits(one_each, bitorder="little")

    def first_allowed(self, ends: Bits) -> Allowed:
        """As `allow`, before the first token. Raises: GrammarFailed."""
        return _with_ends(self._first.clone(), ends if self._may_be_empty else None)

    def allow(self, matcher: Matcher, ends: Bits, allowed: Allowed) -> Allowed:
        """Fills in what goes on with the answer and, where it is complete, the tokens `ends`. Raises: GrammarFailed."""
        self._make(matcher, allowed)
        return _with_ends(allowed, ends if matcher.is_accepting() else None)

    def forced(self, matcher: Matcher, allowed: Allowed) -> list[int]:
        """Tokens that are bound to come next, where `allowed`, its mask, leaves only one; else none."""
        if (only := only_token(allowed)) is None:
            return []
        token_ids = forced_tokens(matcher)
        return token_ids if token_ids[:1] == [only] else []

    def _make(self, matcher: Matcher, allowed: Allowed) -> Allowed:
        """The tokens with a text of their own that may come."""
        fill_next_tokens(matcher, allowed.data_ptr(), len(allowed))
        bits = allowed.numpy()
        numpy.bitwise_and(bits, self._texts, out=bits)
        return allowed


def only_token(allowed: Allowed) -> int | None:
    """None where more than one may come."""
    [places] = allowed.numpy().nonzero()
    if len(places) != 1:
        return None
    bits = int(allowed[int(places[0])])
    return 8 * int(places[0]) + bits.bit_length() - 1 if bits.bit_count() == 1 else None


def _with_ends(allowed: Allowed, ends: Bits | None) -> Allowed:
    """Raises: GrammarFailed."""
    bits = allowed.numpy()
    if ends is not None:
        numpy.bitwise_or(bits, ends, out=bits)
    elif not bits.any():
        raise GrammarFailed("there is no token to go on with")
    return allowed


class Follower:
    """One choice: its matcher, and the mask that was asked for last. All its masks are made in the same memory."""

    def __init__(self, grammar: Grammar, ends: Bits) -> None:
        self._grammar = grammar
        self._ends = ends
        self._matcher: Matcher | None = None
        self._allowed = grammar.empty()
        self._forced: list[int] = []  # tokens that are bound to come next
        self.tokens = 0  # of the answer, that it was told of
        self.mask = Mask.of(self._allowed)  # of the token after those; of none, never asked for

    def follow(self, token_ids: Sequence[int], threads: Threads) -> Mask:
        """Of no tokens, what was asked for last and is late. The mask is good until the next one is asked for."""
        if token_ids:
            self.tokens += len(token_ids)
            self.mask = Mask(self._next, token_ids)
            threads.submit(self.mask)
        else:
            threads.submit(Mask.of(self._allowed))  # wakes another thread, should one be held up by a mask before this
        return self.mask

    def _next(self, token_ids: Sequence[int]) -> Allowed:
        if self._matcher is None:
            self._matcher = self._grammar.matcher()
        take_tokens(self._matcher, token_ids)
        for token_id in token_ids:
            self._forced = self._forced[1:] if self._forced[:1] == [token_id] else []
        if self._forced:  # the library would spell the whole text anew for every token of it
            bits, token_id = self._allowed.numpy(), self._forced[0]
            bits.fill(0)
            bits[token_id // 8] = 1 << token_id % 8
        else:
            self._grammar.allow(self._matcher, self._ends, self._allowed)
            self._forced = self._grammar.forced(self._matcher, self._allowed)
        return self._allowed


class Constraint:
    """Of one request, for all its choices. One thread at a time, the engine's."""

    def __init__(self, grammar: Grammar, stop_token_ids: Iterable[int], threads: Threads) -> None:
        """`stop_token_ids`: of the request. Raises: FormRefused where none of them can end an answer, GrammarFailed."""
        self._grammar = grammar
        self._ends = grammar.bits(grammar.vocabulary.ends(stop_token_ids))
        self._threads = threads
        self._first = Mask.of(grammar.first_allowed(self._ends))
        self._followers: dict[int, Follower] = {}

    def mask(self, choice: int, history: Sequence[int], prompt_tokens: int) -> Mask:
        """Of the token after `history`: the prompt, of so many tokens, and all of a choice so far.

        Returns at once, and asking again costs nothing once it is ready. Its result raises GrammarFailed where there is
        no way on that can be found in bounds.
        """
        answer_tokens = len(history) - prompt_tokens
        if answer_tokens == 0:
            return self._first
        follower = self._followers.get(choice)
        if follower is None or follower.tokens > answer_tokens:
            follower = self._followers[choice] = Follower(self._grammar, self._ends)
        elif follower.tokens == answer_tokens and follower.mask.is_ready:
            return follower.mask
        return follower.follow(history[prompt_tokens + follower.tokens :], self._threads)


def wait_for(masks: Sequence[Mask], began_s: float, has_neighbours: bool) -> None:
    """Gives masks that are not ready a little longer; until one is, where a step has nothing else to draw.

    What is not ready then does not hold up the rest: it is drawn in a later step. `began_s`: monotonic, of the step.
    """
    if all(mask.is_ready for mask in masks):
        return
    late = wait(masks, max(0.0, NEIGHBOURS_SHARE * (time.monotonic() - began_s)))
    if len(late) == len(masks) and not has_neighbours:
        wait(late, PATIENCE_S, first=True)
