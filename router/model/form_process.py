"""Helper process that checks a client's form (JSON schema, regular expression or grammar of the answer).

It compiles the form and follows a few random answers. It can be killed, and imports little, since a client waits for
its start.
"""

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from baton.process.helper import Buffer, answer_frames
from baton.text.structured.library import (
    GrammarFailed,
    LibraryMissing,
    Vocabulary,
    compile_form,
    next_tokens,
    read_vocabulary,
    take_tokens,
)
from baton.text.structured.output import FormRefused, StructuredKind, StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher

WALKS = 4
WALK_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings of a checker process, which it gets as JSON on its command line."""

    folder: str  # folder of the checkpoint
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    cpu_s: float = 2.0  # maximum CPU time of checking one form
    memory_bytes: int = 1 << 30  # maximum address space, in addition to the vocabulary


def fault(output: StructuredOutput, vocabulary: Vocabulary) -> str | None:
    """Return why no answer can satisfy this form; None if a few random beginnings of answers satisfy it."""
    chance = random.Random(0)
    try:
        form = compile_form(output, vocabulary)
        for _ in range(WALKS):
            _walk(form.deep_copy(), vocabulary, chance)
    except FormRefused as error:
        return str(error)
    except GrammarFailed:
        return "is too ambiguous, or cannot be completed"
    return None


def _walk(matcher: "LLMatcher", vocabulary: Vocabulary, chance: random.Random) -> None:
    """Follow the grammar along the first WALK_TOKENS tokens of a random answer. Raises: GrammarFailed."""
    for _ in range(WALK_TOKENS):
        texts = int.from_bytes(next_tokens(matcher), "little") & vocabulary.text_bits
        if not texts:
            if not matcher.is_accepting():
                raise GrammarFailed("no token can follow")
            return
        take_tokens(matcher, [_some_bit(texts, chance.randrange(vocabulary.size))])


def _some_bit(bits: int, start: int) -> int:
    """Return the index of the first set bit from index `start` on, cyclically, without a loop over the bits."""
    later = bits >> start
    return start + _lowest_bit(later) if later else _lowest_bit(bits)


def _lowest_bit(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def main(setup: Setup) -> int:
    try:
        vocabulary = read_vocabulary(Path(setup.folder), setup.vocab_size, setup.eos_token_ids)
    except (FormRefused, LibraryMissing) as error:
        return answer_frames(lambda asked: [], fault=str(error))

    def verdict(asked: memoryview) -> Sequence[Buffer]:
        kind, text = json.loads(bytes(asked))
        found = fault(StructuredOutput(StructuredKind(kind), text), vocabulary) or ""
        return [found.encode(errors="replace")]

    # A client waits for the verdict, so the process does not lower its priority (niceness 0).
    return answer_frames(verdict, niceness=0, cpu_s=setup.cpu_s, memory_bytes=setup.memory_bytes)


if __name__ == "__main__":
    sys.exit(main(Setup(**json.loads(sys.argv[1]))))
