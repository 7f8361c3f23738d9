"""Amounts of memory as people write them: `512MiB`, `1.5GiB`, `200000`."""

import re

UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}
PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)\s*", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """`1.5GiB` -> 1610612736. Raises ValueError that names the accepted forms."""
    match = PATTERN.fullmatch(text)
    unit = match[2].upper() if match else "?"
    unit = unit if unit in UNITS else f"{unit}B"
    if match is None or unit not in UNITS:
        raise ValueError(f"{text!r} is not an amount of memory such as 512MiB or 2GiB")
    return int(float(match[1]) * UNITS[unit])


def format_bytes(count: int) -> str:
    """1610612736 -> `1.5 GiB`."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} B"
