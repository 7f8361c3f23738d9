"""Uniform numbers by counter, not by state: the same request draws the same token on any worker, in any batch."""

_MASK = (1 << 64) - 1


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits for one token of one choice.

    seed: 64 bits (taken modulo 2**64); choice: index among the request's choices; position: absolute position of the
    token that is drawn. Each is mixed in by the finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable
    Pseudorandom Number Generators, 2014), so that neighbouring seeds, choices and positions are unrelated.
    """
    state = _mix(seed)
    state = _mix(state ^ choice)
    state = _mix(state ^ position)
    return (state >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
