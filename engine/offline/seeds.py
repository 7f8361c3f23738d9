"""Seeds of requests that name none, and the seed under which a single request draws the tokens of one of n choices."""

import hashlib

_MASK = (1 << 64) - 1
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # of SplitMix64: engine/uniform.py


def request_seed(engine_seed: int, number: int) -> int:
    """The seed, 64 bits, of the engine's `number`th request: another for each, the same in every run."""
    return int.from_bytes(hashlib.sha256(f"{engine_seed}:{number}".encode()).digest()[:8], "little")


def seed_of_choice(seed: int, choice: int) -> int:
    """A request with n=1 and this seed answers as the given choice of a request with n>1 and `seed` does."""
    return _unmixed(_mixed(seed) ^ choice)


def _mixed(value: int) -> int:
    value = (value + _STEP) & _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def _unmixed(value: int) -> int:
    value = (_unshifted(value, 31) * pow(_SECOND, -1, 1 << 64)) & _MASK
    value = (_unshifted(value, 27) * pow(_FIRST, -1, 1 << 64)) & _MASK
    return (_unshifted(value, 30) - _STEP) & _MASK


def _unshifted(value: int, bits: int) -> int:
    """Solves value = x ^ (x >> bits) for x; every round makes `bits` more of its upper bits right."""
    solved = value
    for _ in range(64 // bits):
        solved = value ^ (solved >> bits)
    return solved
