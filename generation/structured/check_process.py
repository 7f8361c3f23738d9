"""A process that compiles clients' forms and takes a few steps along them, so that it can be killed. One at a time.

Lines of JSON in and out: first the Setup, then forms; each is answered by a verdict. It ends with its standard input.
"""

import json
import os
import random
import resource
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from baton.generation.structured.library import (
    GrammarFailed,
    LibraryMissing,
    Vocabulary,
    compile_form,
    next_tokens,
    read_vocabulary,
)
from baton.generation.structured.library import take_tokens as take
from baton.generation.structured.output import FormRefused, StructuredKind, StructuredOutput

WALKS = 4
WALK_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings of a checker; plain values, since it travels as JSON."""

    folder: str  # of the checkpoint
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    memory_bytes: int  # of address space, beyond that of the vocabulary

    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


def main() -> int:
    lines = iter(sys.stdin.buffer.readline, b"")
    setup = Setup(**json.loads(next(lines)))
    try:
        vocabulary = read_vocabulary(Path(setup.folder), setup.vocab_size, setup.eos_token_ids)
    except (FormRefused, LibraryMissing) as error:
        _tell(error=str(error))
        return 1
    _limit_memory(setup.memory_bytes)
    _tell(error=None)
    for line in lines:
        asked = json.loads(line)
        _tell(error=fault(StructuredOutput(StructuredKind(asked["kind"]), asked["text"]), vocabulary))
    return 0


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
        bits = next_tokens(matcher)
        texts = set(_token_ids(bits)) - vocabulary.special
        if not texts:
            if not matcher.is_accepting():
                raise GrammarFailed("there is no token to go on with")
            return
        take(matcher, [chance.choice(sorted(texts))])


def _token_ids(bits: bytes) -> Iterator[int]:
    """Some of them: of all bytes that have any, a few."""
    for index, byte in enumerate(bits):
        if byte:
            yield from (8 * index + bit for bit in range(8) if byte >> bit & 1)


def _limit_memory(more_bytes: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    most = pages * os.sysconf("SC_PAGE_SIZE") + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _tell(**verdict: Any) -> None:
    sys.stdout.buffer.write(json.dumps(verdict).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
