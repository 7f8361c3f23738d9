"""Times in JSON: to the microsecond, which is more than any of them is good for."""

from collections.abc import Mapping

DECIMALS = 3


def round_ms(value: float) -> float:
    return round(value, DECIMALS)


def round_milliseconds(fields: Mapping[str, object]) -> dict[str, object]:
    """The same fields, those in milliseconds (by their names) rounded."""
    return {
        name: round_ms(value) if name.endswith("_ms") and isinstance(value, float) else value
        for name, value in fields.items()
    }
