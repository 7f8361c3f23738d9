"""The process that finds out whether structured output can be followed: it compiles clients' forms and takes a few
steps along them, so that it can be killed. It imports little, since a client waits while it starts.
"""

import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
from baton.service.helper import Buffer, answer_frames

WALKS = 4
WALK_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings of a checker; plain values, since they travel as JSON."""

    folder: str  # of the checkpoint
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    memory_bytes: int = 1 << 30  # of address space, beyond that of the vocabulary


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
