"""Amounts of memory, read and written."""

import pytest

from baton.cli.options import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("512MiB", 512 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("2 gib", 2 * 2**30),
        ("200000", 200_000),
        ("1GB", 10**9),
        ("4G", 4 * 10**9),
    ],
)
def test_reads_amounts_with_and_without_units(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1XiB", "1 2", "nan"])
def test_refuses_what_is_no_amount_and_says_how_to_write_one(text: str) -> None:
    with pytest.raises(ValueError, match="such as 512MiB"):
        parse_bytes(text)


def test_writes_with_the_largest_unit_that_fits() -> None:
    assert [format_bytes(count) for count in (12, 2**20, 3 * 2**29)] == ["12 B", "1 MiB", "1.5 GiB"]
