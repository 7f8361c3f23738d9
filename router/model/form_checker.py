"""Whether structured output can be followed, found out in processes of their own, within bounds of time and memory.

This module is also the `__main__` of such a process: it compiles clients' forms and takes a few steps along them, so
that it can be killed.
"""

import hashlib
import json
import queue
import random
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from baton.generation.structured.library import (
    GrammarFailed,
    LibraryMissing,
    Vocabulary,
    compile_form,
    next_tokens,
    read_vocabulary,
    take_tokens,
)
from baton.generation.structured.output import FormRefused, StructuredKind, StructuredOutput
from baton.service.helper import Buffer, HelperFailed, HelperNotStarted, HelperProcess, HelperSlow, answer_frames

MEMORY_BYTES = 1 << 30
REMEMBERED = 4096  # verdicts
WALKS = 4
WALK_TOKENS = 24


class CheckerBroken(RuntimeError):
    """The process that checks does not work; there is no verdict on the form."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings of a checker; plain values, since they travel as JSON."""

    folder: str  # of the checkpoint
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    memory_bytes: int  # of address space, beyond that of the vocabulary


class Checker:
    """Remembers its verdicts. Any thread may ask; each of its processes is asked by one at a time."""

    def __init__(self, setup: Setup, processes: int, limit_s: float) -> None:
        """`limit_s` is for one form, without the start of a process, which is put off until the first question."""
        self._memory_bytes = setup.memory_bytes
        self._limit_s = limit_s
        arguments = json.dumps(asdict(setup))
        self._processes = tuple(HelperProcess("baton.router.model.form_checker", arguments) for _ in range(processes))
        self._idle: queue.SimpleQueue[HelperProcess] = queue.SimpleQueue()
        for process in self._processes:
            self._idle.put(process)
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()
        self._lock = threading.Lock()
        self.checked = 0  # in a process

    def known(self, output: StructuredOutput) -> bool:
        with self._lock:
            return _key(output) in self._verdicts

    def check(self, output: StructuredOutput) -> str | None:
        """The error in the form, if any. Blocks. Raises: CheckerBroken."""
        key = _key(output)
        with self._lock:
            if key in self._verdicts:
                self._verdicts.move_to_end(key)
                return self._verdicts[key]
        process = self._idle.get()
        try:
            found = self._ask(process, output)
        finally:
            self._idle.put(process)
        with self._lock:
            self.checked += 1
            self._verdicts[key] = found
            if len(self._verdicts) > REMEMBERED:
                self._verdicts.popitem(last=False)
        return found

    def close(self) -> None:
        """Ends the processes; a check that is under way fails."""
        for process in self._processes:
            process.close()

    def _ask(self, process: HelperProcess, output: StructuredOutput) -> str | None:
        try:
            return process.ask([json.dumps([output.kind.value, output.text]).encode()], self._limit_s).decode() or None
        except HelperNotStarted as error:
            raise CheckerBroken(error.fault or "the process that checks forms does not start") from error
        except HelperSlow:
            return f"takes more than {self._limit_s:g} s to compile"
        except HelperFailed:
            return f"takes more than {self._memory_bytes >> 20} MiB to compile"


def _key(output: StructuredOutput) -> bytes:
    return hashlib.sha256(f"{output.kind.value}\n{output.text}".encode(errors="surrogatepass")).digest()


def fault(output: StructuredOutput, vocabulary: Vocabulary) -> str | None:
    """Why an answer cannot be held to this form; None if it can, as far as some random beginnings of answers show."""
    chance = random.Random(0)
    try:
        for _ in range(WALKS):
            _walk(output, vocabulary, chance)
    except FormRefused as error:
        return str(error)
    except GrammarFailed as error:
        return f"cannot be followed: {error}"
    return None


def _walk(output: StructuredOutput, vocabulary: Vocabulary, chance: random.Random) -> None:
    """Raises: FormRefused, GrammarFailed."""
    matcher = compile_form(output, vocabulary)
    for _ in range(WALK_TOKENS):
        texts = set(_token_ids(next_tokens(matcher))) - vocabulary.special
        if not texts:
            if not matcher.is_accepting():
                raise GrammarFailed("there is no token to go on with")
            return
        take_tokens(matcher, [chance.choice(sorted(texts))])


def _token_ids(bits: bytes) -> Iterator[int]:
    for index, byte in enumerate(bits):
        if byte:
            yield from (8 * index + bit for bit in range(8) if byte >> bit & 1)


def main(setup: Setup) -> int:
    try:
        vocabulary = read_vocabulary(Path(setup.folder), setup.vocab_size, setup.eos_token_ids)
    except (FormRefused, LibraryMissing) as error:
        return answer_frames(lambda asked: [], fault=str(error))

    def verdict(asked: memoryview) -> Sequence[Buffer]:
        kind, text = json.loads(bytes(asked))
        found = fault(StructuredOutput(StructuredKind(kind), text), vocabulary) or ""
        return [found.encode(errors="replace")]

    # A client waits for the verdict, and the time for it is short: it is not put behind other processes.
    return answer_frames(verdict, niceness=0, memory_bytes=setup.memory_bytes)


if __name__ == "__main__":
    sys.exit(main(Setup(**json.loads(sys.argv[1]))))
