"""Masks of the tokens that may come next in structured output, and the grammars compiled for one model.

Masks are computed on threads during the forward pass, also for drafts. A choice's matcher state follows from its tokens
alone, so it does not matter which worker generated them, how often their KV was preempted, or which drafts were tried.
"""

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy
import numpy.typing
import torch

from baton.engine.sampling.mask_threads import Allowed, Mask, MaskThreads, wait
from baton.text.structured.library import (
    GrammarFailed,
    LibraryMissing,
    Vocabulary,
    compile_form,
    fill_next_tokens,
    forced_tokens,
    read_vocabulary,
    take_back,
    take_tokens,
    takeable_tokens,
)
from baton.text.structured.output import FormRefused, StructuredOutput
from baton.text.tokenizer.checkpoint_tokenizer import TokenizerRefused, read_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from baton.text.structured.library import LLMatcher

Words = numpy.typing.NDArray[numpy.uint32]
"""One bit per token of the vocabulary in 32-bit words, the least significant bit first."""
MASK_WAIT_SHARE = 0.03  # longest wait for masks, as a fraction of the step's time so far
MASK_TIMEOUT_S = 30.0  # longest wait for a mask if the step has nothing else to sample


class MaskBuffer:
    """Memory for one mask, of the size that the library expects.

    The address is cached, since computing a mask takes only microseconds.
    """

    __slots__ = ("address", "allowed", "size_bytes", "words")

    def __init__(self, vocab_size: int) -> None:
        self.size_bytes = -(-vocab_size // 32) * 4
        self.allowed: Allowed = torch.zeros(self.size_bytes, dtype=torch.uint8)
        self.address = self.allowed.data_ptr()
        self.words: Words = self.allowed.numpy().view(numpy.uint32)  # view of `allowed` as 32-bit words


class Grammar:
    """Grammar compiled for one vocabulary; immutable and shared by all requests that use it."""

    def __init__(self, matcher: "LLMatcher", vocabulary: Vocabulary) -> None:
        """Compute the mask of the first token. `matcher` must not have consumed a token."""
        self.vocabulary = vocabulary
        self._matcher = matcher
        self._texts = ~self.bits(vocabulary.special) & self.bits(slice(vocabulary.size))
        self._first = self.room()
        self._fill(matcher, self._first)
        self._may_be_empty = matcher.is_accepting()

    def matcher(self) -> "LLMatcher":
        """Return a copy of the matcher for one answer."""
        return self._matcher.deep_copy()

    def room(self) -> MaskBuffer:
        return MaskBuffer(self.vocabulary.size)

    def bits(self, token_ids: Iterable[int] | slice) -> Words:
        one_each = numpy.zeros(8 * self.room().size_bytes, numpy.bool_)
        one_each[token_ids if isinstance(token_ids, slice) else list(token_ids)] = True
        return numpy.packbits(one_each, bitorder="little").view(numpy.uint32)

    def first_allowed(self, ends: Words) -> Allowed:
        """Return the mask of an answer's first token. `ends`: tokens that end an answer. Raises: GrammarFailed."""
        room = self.room()
        numpy.copyto(room.words, self._first.words)
        _add_ends(room, ends if self._may_be_empty else None)
        return room.allowed

    def allow(self, matcher: "LLMatcher", ends: Words, room: MaskBuffer) -> list[int]:
        """Write the mask of the next token to `room`: continuations and, if the answer is complete, `ends`.

        Return the tokens that must come next if only one token is allowed, otherwise an empty list. Raises:
        GrammarFailed.
        """
        self._fill(matcher, room)
        taken_words = _add_ends(room, ends if matcher.is_accepting() else None)
        if taken_words > 1 or (only := only_token(room)) is None:
            return []
        token_ids = forced_tokens(matcher)
        return token_ids if token_ids[:1] == [only] else []

    def _fill(self, matcher: "LLMatcher", room: MaskBuffer) -> None:
        """Write the mask of the allowed tokens to `room`, without special tokens. Raises: GrammarFailed."""
        fill_next_tokens(matcher, room.address, room.size_bytes)
        numpy.bitwise_and(room.words, self._texts, out=room.words)


def only_token(room: MaskBuffer) -> int | None:
    """Return the only token of a mask with one non-zero 32-bit word, or None if that word has several tokens."""
    place = int(room.words.argmax())
    word = int(room.words[place])
    return 32 * place + word.bit_length() - 1 if word.bit_count() == 1 else None


def _add_ends(room: MaskBuffer, ends: Words | None) -> int:
    """Add the tokens `ends` to a mask; return its number of non-zero 32-bit words. Raises: GrammarFailed if it is 0."""
    if ends is not None:
        numpy.bitwise_or(room.words, ends, out=room.words)
    taken_words = int(numpy.count_nonzero(room.words))
    if not taken_words:
        raise GrammarFailed("no token can follow")
    return taken_words


class AllowedDrafts(NamedTuple):
    """Drafted tokens that a grammar allows in sequence."""

    token_ids: Sequence[int] = ()
    bound: int = 0  # number of leading tokens that the grammar forces


class GrammarState:
    """Grammar state of one choice: its matcher, and the masks requested since the answer last grew.

    The matcher has consumed the answer and perhaps drafts after it. It rolls drafts back if the answer continues with
    another token. Later masks reuse the memory of earlier masks.
    """

    __slots__ = ("_ahead", "_answer", "_ends", "_forced", "_grammar", "_lock", "_masks", "_matcher", "_rooms", "_taken")

    def __init__(self, grammar: Grammar, ends: Words) -> None:
        self._grammar = grammar
        self._ends = ends
        self._answer: list[int] = []  # answer tokens, extended by the engine's thread
        self._masks: dict[int, tuple[Sequence[int], Mask]] = {}  # by number of drafts: the drafts and their mask
        self._rooms: list[MaskBuffer] = []  # memory of masks, by number of drafts
        self._lock = threading.Lock()  # guards the fields below
        self._matcher: LLMatcher | None = None
        self._taken = 0  # answer tokens that the matcher has consumed
        self._ahead: Sequence[int] = ()  # drafts that the matcher has consumed after those answer tokens
        self._forced: list[int] = []  # tokens that must come next at the matcher's position

    @property
    def tokens(self) -> int:
        return len(self._answer)

    def follow(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the answer, and drop the masks of its earlier tokens."""
        if token_ids:
            self._answer += token_ids
            self._masks.clear()

    def mask(self, drafted: Sequence[int], threads: MaskThreads) -> Mask:
        """Request the mask of the token after the answer and these drafts."""
        asked = self._masks.get(len(drafted))
        if asked is not None and asked[0] == drafted:
            if not asked[1].is_ready:
                threads.submit(Mask.of(self._room(0).allowed))  # wakes another thread if a slow mask blocks one
            return asked[1]
        mask = Mask(partial(self._make, len(self._answer), self._room(len(drafted))), drafted)
        self._masks[len(drafted)] = drafted, mask
        threads.submit(mask)
        return mask

    def vet(self, drafted: Sequence[int], most: int) -> AllowedDrafts:
        """Return the prefix of `drafted` that the grammar allows.

        If `drafted` does not begin with the tokens that the grammar forces, return the forced tokens instead, at most
        `most`. Does not wait: returns no tokens while a mask is being computed.
        """
        if any(not mask.is_ready for _, mask in self._masks.values()) or not self._lock.acquire(blocking=False):
            return AllowedDrafts()
        try:
            with self._renewed_on_failure():
                matcher = self._stand(len(self._answer), ())
                bound = (self._forced or forced_tokens(matcher))[:most]
                if bound and list(drafted[: len(bound)]) != bound:
                    return AllowedDrafts(bound, len(bound))
                return AllowedDrafts(drafted[: takeable_tokens(matcher, drafted)], len(bound))
        except GrammarFailed:
            return AllowedDrafts()  # if the answer itself fails, and not only a draft, its mask reports it
        finally:
            self._lock.release()

    def _room(self, drafts: int) -> MaskBuffer:
        while len(self._rooms) <= drafts:
            self._rooms.append(self._grammar.room())
        return self._rooms[drafts]

    def _make(self, answer_tokens: int, room: MaskBuffer, drafted: Sequence[int]) -> Allowed:
        """Compute a mask on a mask thread. Raises: GrammarFailed."""
        with self._lock, self._renewed_on_failure():
            if answer_tokens == len(self._answer):  # otherwise the answer has grown and this mask is obsolete
                matcher = self._stand(answer_tokens, drafted)
                if self._forced:  # write the mask here, since the library takes long for forced texts
                    room.words.fill(0)
                    room.words[self._forced[0] // 32] = 1 << self._forced[0] % 32
                else:
                    self._forced = self._grammar.allow(matcher, self._ends, room)
        return room.allowed

    def _stand(self, answer_tokens: int, drafted: Sequence[int]) -> "LLMatcher":
        """Return the matcher behind the first `answer_tokens` answer tokens and `drafted`. Raises: GrammarFailed."""
        matcher = self._matcher = self._matcher or self._grammar.matcher()
        wanted = [*self._answer[self._taken : answer_tokens], *drafted]
        alike = 0
        while alike < min(len(wanted), len(self._ahead)) and wanted[alike] == self._ahead[alike]:
            alike += 1
        if alike < len(self._ahead):
            take_back(matcher, len(self._ahead) - alike)
            self._forced = []
        new = wanted[alike:]
        take_tokens(matcher, new)
        self._forced = self._forced[len(new) :] if self._forced[: len(new)] == new else []
        self._taken, self._ahead = answer_tokens, drafted
        return matcher

    @contextlib.contextmanager
    def _renewed_on_failure(self) -> Iterator[None]:
        """Drop the matcher on GrammarFailed, since it would stay failed. The next use creates a new matcher."""
        try:
            yield
        except GrammarFailed:
            self._matcher, self._taken, self._ahead, self._forced = None, 0, (), []
            raise


class Constraint:
    """Structured-output constraint of one request's answers. Used only by the engine's thread."""

    def __init__(self, grammar: Grammar, stop_token_ids: Iterable[int], threads: MaskThreads) -> None:
        """Prepare the first mask. Raises: FormRefused if no stop token can end an answer; GrammarFailed."""
        self._grammar = grammar
        self._ends = grammar.bits(grammar.vocabulary.ends(stop_token_ids))
        self._threads = threads
        self._first = Mask.of(grammar.first_allowed(self._ends))
        self._states: dict[int, GrammarState] = {}

    def mask(self, choice: int, history: Sequence[int], prompt_tokens: int, drafted_tokens: int = 0) -> Mask:
        """Request the mask of the token after `history`, which consists of prompt, answer so far, and drafts.

        Returns immediately; repeated calls return the same mask. `Mask.result` raises GrammarFailed if no continuation
        of bounded length exists.
        """
        answer_end = len(history) - drafted_tokens
        if answer_end == prompt_tokens:
            return self._first
        return self._state(choice, history, prompt_tokens, answer_end).mask(list(history[answer_end:]), self._threads)

    def vet(
        self, choice: int, history: Sequence[int], prompt_tokens: int, drafted: Sequence[int], most: int
    ) -> AllowedDrafts:
        """Return the allowed drafts after `history`: see `GrammarState.vet`. Does not wait."""
        special = self._grammar.vocabulary.special  # these tokens end an answer or are never sampled
        texts = list(takewhile(lambda token_id: token_id not in special, drafted))
        return self._state(choice, history, prompt_tokens, len(history)).vet(texts, most)

    def _state(self, choice: int, history: Sequence[int], prompt_tokens: int, answer_end: int) -> GrammarState:
        state = self._states.get(choice)
        if state is None or state.tokens > answer_end - prompt_tokens:
            state = self._states[choice] = GrammarState(self._grammar, self._ends)
        state.follow(history[prompt_tokens + state.tokens : answer_end])
        return state


@dataclass(slots=True)
class StepClock:
    """Start of a step, in monotonic seconds, and the seconds that the step has waited for masks."""

    began_s: float
    masks_s: float = 0.0


def wait_for(masks: Sequence[Mask], clock: StepClock, has_neighbours: bool, of_drafts: Sequence[Mask] = ()) -> None:
    """Wait briefly for late masks; if the step has nothing else to sample, wait until one is ready.

    Rows whose mask stays late are sampled in a later step. `has_neighbours`: whether the step has rows without masks.
    `of_drafts`: masks of drafted rows, which get only the brief wait, since they may turn out unused.
    """
    late = [mask for mask in (*masks, *of_drafts) if not mask.is_ready]
    if not late:
        return
    now = time.monotonic()
    late = wait(late, max(0.0, MASK_WAIT_SHARE * (now - clock.began_s)))
    if not has_neighbours and all(mask in late for mask in masks):
        wait(masks, MASK_TIMEOUT_S, first=True)
    clock.masks_s += time.monotonic() - now


MAX_GRAMMARS = 32  # compiled grammars kept per model
MASK_THREADS = 2


class Grammars:
    """Compiled grammars of one model. Thread-safe. Close it after all engines that use its constraints."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """Remember the checkpoint `folder`, whose tokenizer is read by `prepare` or with the first grammar."""
        self._folder = folder
        self.vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._vocabulary: Vocabulary | None = None
        self._tokenizer: Tokenizer | None = None
        self._grammars: OrderedDict[StructuredOutput, Grammar] = OrderedDict()
        self._lock = threading.Lock()
        self._threads = MaskThreads(MASK_THREADS)
        self.compiled = 0  # number of compilations since the start

    def prepare(self) -> None:
        """Read the tokenizer now. This blocks all other Python threads, for 1 s with a vocabulary of 128 000 tokens.

        On failure, requests for structured output fail with the reason.
        """
        with contextlib.suppress(FormRefused, LibraryMissing), self._lock:
            self._read()

    def constraint(self, output: StructuredOutput, stop_token_ids: Iterable[int]) -> Constraint:
        """Return a request's constraint; blocks while its grammar is compiled. Raises: FormRefused, LibraryMissing."""
        try:
            return Constraint(self._grammar(output), stop_token_ids, self._threads)
        except GrammarFailed as error:
            raise FormRefused("is too ambiguous, or cannot be completed") from error

    def token_ids(self, text: str) -> tuple[int, ...]:
        """Tokenize a text, which may contain special tokens, without adding any. Raises: FormRefused."""
        with self._lock:
            if self._tokenizer is None:
                try:
                    self._tokenizer = read_tokenizer(self._folder).tokenizer()
                except TokenizerRefused as error:
                    raise FormRefused(f"the model's tokenizer cannot be read: {error}") from error
            return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def close(self) -> None:
        self._threads.close()

    def _grammar(self, output: StructuredOutput) -> Grammar:
        with self._lock:
            vocabulary = self._read()
            if output in self._grammars:
                self._grammars.move_to_end(output)
                return self._grammars[output]
        grammar = Grammar(compile_form(output, vocabulary), vocabulary)
        with self._lock:
            self.compiled += 1
            self._grammars[output] = grammar
            if len(self._grammars) > MAX_GRAMMARS:
                self._grammars.popitem(last=False)
        return grammar

    def _read(self) -> Vocabulary:
        if self._vocabulary is None:
            self._vocabulary = read_vocabulary(self._folder, self.vocab_size, self._eos_token_ids)
        return self._vocabulary
