"""Token sequences that spell a bad word."""

from collections.abc import Callable, Sequence


def spellings(word: str, encode: Callable[[str], Sequence[int]]) -> list[tuple[int, ...]]:
    """Return the tokens of a word as it is and, unless they end with those, its tokens after a space.

    The list is empty if the tokenizer has no tokens for the word.
    """
    alone, after_space = tuple(encode(word)), tuple(encode(f" {word}"))
    if not alone:
        return []
    return [alone] if after_space[-len(alone) :] == alone else [alone, after_space]
