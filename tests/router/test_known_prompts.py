"""What is kept of prompts, for whom, and what is given up."""

from baton.router.model.known_prompts import NAME_BYTES, PART_BYTES, TOKEN_BYTES, Kept, KnownPrompts, part_keys

ROOT, OTHER = b"r" * 32, b"o" * 32
ONE = Kept((1, 2, 3), (b"n" * 32,), b"123")
BYTES = PART_BYTES + 3 * TOKEN_BYTES + NAME_BYTES + 3


def kept(known: KnownPrompts, *parts: str, root: bytes = ROOT) -> int:
    return len(known.find(part_keys(root, False, parts)))


def keep(known: KnownPrompts, *parts: str) -> None:
    keys = part_keys(ROOT, False, parts)
    known.keep(keys, [ONE] * (len(parts) - len(known.find(keys))))


def test_prompt_is_known_up_to_its_common_prefix() -> None:
    known = KnownPrompts(1 << 20)
    keep(known, "a", "b", "c")
    assert [kept(known, *parts) for parts in ("abcd", "abd", "ac", "b", "")] == [3, 2, 1, 0, 0]
    assert known.find(part_keys(ROOT, False, "ab")) == [ONE, ONE]


def test_same_text_in_other_parts_is_unknown() -> None:
    known = KnownPrompts(1 << 20)
    keep(known, "ab", "c")
    assert kept(known, "a", "bc") == kept(known, "abc") == 0


def test_nothing_is_known_under_another_root_or_with_special_tokens() -> None:
    known = KnownPrompts(1 << 20)
    keep(known, "a", "b")
    assert kept(known, "a", "b", root=OTHER) == 0
    assert known.find(part_keys(ROOT, True, ["a", "b"])) == []


def test_equal_beginnings_are_kept_once() -> None:
    known = KnownPrompts(1 << 20)
    keep(known, "a", "b")
    keep(known, "a", "c")
    assert known.memory_bytes == 3 * BYTES


def test_end_of_the_oldest_prompt_is_evicted_first() -> None:
    known = KnownPrompts(5 * BYTES)
    keep(known, "a", "b", "c")
    keep(known, "x", "y", "z")
    assert (kept(known, *"abc"), kept(known, *"xyz")) == (2, 3)
    assert known.memory_bytes == 5 * BYTES


def test_repeated_prompt_is_kept_longer() -> None:
    known = KnownPrompts(4 * BYTES)
    keep(known, "a", "b")
    keep(known, "x", "y")
    keep(known, "a", "b")
    keep(known, "m", "n")
    assert (kept(known, *"ab"), kept(known, *"xy"), kept(known, *"mn")) == (2, 0, 2)


def test_beginning_of_a_prompt_that_does_not_fit_is_kept() -> None:
    known = KnownPrompts(2 * BYTES)
    keep(known, "a", "b", "c", "d")
    assert kept(known, *"abcd") == 2


def test_without_memory_nothing_is_kept() -> None:
    known = KnownPrompts(0)
    keep(known, "a", "b")
    assert kept(known, "a", "b") == known.memory_bytes == 0
