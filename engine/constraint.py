"""Which tokens may come next in an answer that is held to a form. Masks are made on threads, beside the forward pass.

A choice's matcher only follows its tokens: what it knows can be found again from them. So it does not matter where they
were made, nor how often their KV was given up in between.
"""

import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait

import numpy
import numpy.typing

from structured.library import GrammarFailed, Matcher, Vocabulary, next_tokens, take_tokens

Banned = numpy.typing.NDArray[numpy.bool_]
"""[vocabulary]: the tokens that may not come."""
NEIGHBOURS_SHARE = 0.03  # of the time since a step began: how much longer it may take for the sake of a mask
PATIENCE_S = 30.0  # of a step that has nothing else to draw


class Grammar:
    """A form, compiled for one vocabulary. Shared by all requests that ask for it; never changed."""

    def __init__(self, matcher: Matcher, vocabulary: Vocabulary) -> None:
        """`matcher` stands before the first token. Computes the mask of that."""
        self.vocabulary = vocabulary
        self._matcher = matcher
        self._special = numpy.array(sorted(vocabulary.special), numpy.int64)
        self._first = self._texts(matcher)
        self._may_be_empty = matcher.is_accepting()

    def matcher(self) -> Matcher:
        """One of its own for an answer."""
        return self._matcher.deep_copy()

    def first_banned(self, ends: Sequence[int]) -> Banned:
        """As `banned`, before the first token. Raises: GrammarFailed."""
        return _banned(self._first.copy(), ends if self._may_be_empty else ())

    def banned(self, matcher: Matcher, ends: Sequence[int]) -> Banned:
        """All but what goes on with the answer and, where it is complete, the tokens `ends`. Raises: GrammarFailed."""
        texts = self._texts(matcher)
        return _banned(texts, ends if matcher.is_accepting() else ())

    def _texts(self, matcher: Matcher) -> Banned:
        """[vocabulary]: the tokens with a text of their own that may come."""
        bits = numpy.frombuffer(next_tokens(matcher), numpy.uint8)
        texts = numpy.unpackbits(bits, count=self.vocabulary.size, bitorder="little").view(numpy.bool_)
        texts[self._special] = False
        return texts


def _banned(texts: Banned, ends: Sequence[int]) -> Banned:
    """Raises: GrammarFailed."""
    texts[list(ends)] = True
    if not texts.any():
        raise GrammarFailed("there is no token to go on with")
    return ~texts


class Follower:
    """One choice: its matcher, and the mask that was asked for last."""

    def __init__(self, grammar: Grammar, ends: Sequence[int]) -> None:
        self._grammar = grammar
        self._ends = ends
        self._matcher: Matcher | None = None
        self._turn = threading.Lock()
        self.tokens = 0  # of the answer, that it was told of
        self._mask: Future[Banned] | None = None  # of the token after those

    def follow(self, token_ids: Sequence[int], threads: Executor) -> "Future[Banned]":
        """Of no tokens, what was asked for last."""
        if token_ids or self._mask is None:
            self.tokens += len(token_ids)
            self._mask = threads.submit(self._next, tuple(token_ids))
        return self._mask

    def _next(self, token_ids: Sequence[int]) -> Banned:
        with self._turn:
            if self._matcher is None:
                self._matcher = self._grammar.matcher()
            take_tokens(self._matcher, token_ids)
            return self._grammar.banned(self._matcher, self._ends)


class Constraint:
    """Of one request, for all its choices. One thread at a time, the engine's."""

    def __init__(self, grammar: Grammar, stop_token_ids: Iterable[int], threads: Executor) -> None:
        """`stop_token_ids`: of the request. Raises: FormRefused where none of them can end an answer, GrammarFailed."""
        self._grammar = grammar
        self._ends = grammar.vocabulary.ends(stop_token_ids)
        self._threads = threads
        self._first: Future[Banned] = Future()
        self._first.set_result(grammar.first_banned(self._ends))
        self._followers: dict[int, Follower] = {}

    def mask(self, choice: int, history: Sequence[int], prompt_tokens: int) -> "Future[Banned]":
        """Of the token after `history`: the prompt, of so many tokens, and all of a choice so far.

        Returns at once, and asking again costs nothing. The future raises GrammarFailed where there is no way on that
        can be found in bounds.
        """
        answer_tokens = len(history) - prompt_tokens
        if answer_tokens == 0:
            return self._first
        follower = self._followers.get(choice)
        if follower is None or follower.tokens > answer_tokens:
            follower = self._followers[choice] = Follower(self._grammar, self._ends)
        return follower.follow(history[prompt_tokens + follower.tokens :], self._threads)


def wait_for(masks: Sequence["Future[Banned]"], began_s: float, has_neighbours: bool) -> None:
    """Gives masks that are not ready a little longer; until one is, where a step has nothing else to draw.

    What is not ready then does not hold up the rest: it is drawn in a later step. `began_s`: monotonic, of the step.
    """
    if all(mask.done() for mask in masks):
        return
    _, late = wait(masks, max(0.0, NEIGHBOURS_SHARE * (time.monotonic() - began_s)))
    if len(late) == len(masks) and not has_neighbours:
        wait(late, PATIENCE_S, FIRST_COMPLETED)
