"""Checks that several fields share. What they refuse, they refuse by the field's name. Pure."""

import math
from collections.abc import Sequence

from service.errors import InvalidArgument

PIECE_TOKENS = 1 << 12


def check_number(name: str, asked: float, least: float, most: float, above: bool = False) -> float:
    """The value of a sampling field, within [least, most]; `above`: within (least, most]. Raises: InvalidArgument."""
    if above and asked == least:
        raise InvalidArgument(f"sampling.{name}", f"must be above {least:g}")
    if not math.isfinite(asked) or not least <= asked <= most:
        raise InvalidArgument(f"sampling.{name}", f"must be a number from {least:g} to {most:g}, not {asked:g}")
    return asked


def check_count(name: str, values: Sequence[object], most: int) -> None:
    """Raises: InvalidArgument for a sampling field of too many values. Reads none of them."""
    if len(values) > most:
        raise InvalidArgument(f"sampling.{name}", f"at most {most}, not {len(values)}")


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int, first: int = 0) -> tuple[int, ...]:
    """The ids as a tuple. Raises: InvalidArgument that names the first one out of range, counted from `first`."""
    checked = tuple(token_ids)
    if checked and not 0 <= min(checked) <= max(checked) < vocab_size:
        index = next(i for i, token_id in enumerate(checked) if not 0 <= token_id < vocab_size)
        raise InvalidArgument(
            f"{field}[{first + index}]", f"{checked[index]} is not a token id; they end at {vocab_size - 1}"
        )
    return checked


def check_long_prompt(field: str, token_ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """The same in pieces, each of which is done in a fraction of a millisecond, for a thread beside an event loop."""
    checked: list[int] = []
    for begin in range(0, len(token_ids), PIECE_TOKENS):
        checked += check_token_ids(field, token_ids[begin : begin + PIECE_TOKENS], vocab_size, begin)
    return tuple(checked)


def check_texts(name: str, texts: Sequence[str], most: int, most_bytes: int) -> tuple[str, ...]:
    """Short texts of a sampling field, none empty. Raises: InvalidArgument."""
    check_count(name, texts, most)
    checked = tuple(texts)
    for index, text in enumerate(checked):
        if not text:
            raise InvalidArgument(f"sampling.{name}[{index}]", "is empty")
        if len(text.encode()) > most_bytes:
            raise InvalidArgument(f"sampling.{name}[{index}]", f"at most {most_bytes} bytes")
    return checked
