"""How long to wait before a process that died is started again. Pure: the caller measures how long it lived."""

from dataclasses import dataclass


@dataclass(slots=True)
class Backoff:
    """0.2 s after the first death, doubling to 10 s; a life of 30 s wipes the slate."""

    first_s: float = 0.2
    longest_s: float = 10.0
    healthy_after_s: float = 30.0
    deaths: int = 0

    def delay_after(self, lived_s: float) -> float:
        if lived_s >= self.healthy_after_s:
            self.deaths = 0
        # The exponent is bounded, so that a process that dies for days does not overflow a float.
        delay_s = min(self.longest_s, self.first_s * 2.0 ** min(self.deaths, 32))
        self.deaths += 1
        return delay_s
