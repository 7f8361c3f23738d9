"""Forms of answers, compiled for one model and kept, and the threads that make their masks."""

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

from baton.engine.sampling.constraint import Constraint, Grammar
from baton.engine.sampling.mask_threads import MaskThreads
from baton.generation.structured.library import GrammarFailed, LibraryMissing, Vocabulary, compile_form, read_vocabulary
from baton.generation.structured.output import FormRefused, StructuredOutput

KEPT = 32  # compiled forms
MASK_THREADS = 2


class Grammars:
    """Any thread may ask. To be closed, after any engine that its constraints were given to."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """`folder`: of the checkpoint, whose tokenizer is read by `prepare`, else when the first form is asked for."""
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._vocabulary: Vocabulary | None = None
        self._grammars: OrderedDict[StructuredOutput, Grammar] = OrderedDict()
        self._lock = threading.Lock()
        self._threads = MaskThreads(MASK_THREADS)
        self.compiled = 0  # since the start

    def prepare(self) -> None:
        """Reads the tokenizer: a second for 128 000 tokens, in which no other thread of Python runs.

        Where that cannot be done, requests for a form fail with the reason.
        """
        with contextlib.suppress(FormRefused, LibraryMissing), self._lock:
            self._read()

    def constraint(self, output: StructuredOutput, stop_token_ids: Iterable[int]) -> Constraint:
        """Blocks while a form is compiled. Raises: FormRefused, LibraryMissing."""
        try:
            return Constraint(self._grammar(output), stop_token_ids, self._threads)
        except GrammarFailed as error:
            raise FormRefused(f"cannot be followed: {error}") from error

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
            if len(self._grammars) > KEPT:
                self._grammars.popitem(last=False)
        return grammar

    def _read(self) -> Vocabulary:
        if self._vocabulary is None:
            self._vocabulary = read_vocabulary(self._folder, self._vocab_size, self._eos_token_ids)
        return self._vocabulary
