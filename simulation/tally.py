"""The results of many seeds. Pure."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from simulation.client import End
from simulation.world import Result


@dataclass(slots=True)
class Tally:
    """Sums over seeds that held."""

    seeds: int = 0
    requests: int = 0
    faults: int = 0
    resumed: int = 0  # streams that a client took up again
    virtual_s: float = 0.0
    ends: Counter[str] = field(default_factory=Counter)  # how requests ended
    kinds: Counter[str] = field(default_factory=Counter)  # of faults
    exercised: Counter[str] = field(default_factory=Counter)  # events that happened

    def add(self, result: Result) -> None:
        self.seeds += 1
        self.requests += len(result.histories)
        self.faults += len(result.faults)
        self.resumed += result.resumed
        self.virtual_s += result.virtual_s
        for history in result.histories:
            end = history.end.name.lower() if history.end is not None else "never"
            self.ends[f"{end}: {history.cause}" if history.end is End.FAILED else end] += 1
        self.kinds.update(fault.kind.name.lower() for fault in result.faults)
        self.exercised.update(result.exercised)

    def merge(self, other: "Tally") -> None:
        self.seeds += other.seeds
        self.requests += other.requests
        self.faults += other.faults
        self.resumed += other.resumed
        self.virtual_s += other.virtual_s
        self.ends.update(other.ends)
        self.kinds.update(other.kinds)
        self.exercised.update(other.exercised)

    def to_plain(self) -> dict[str, Any]:
        return {
            "seeds": self.seeds,
            "requests": self.requests,
            "faults": self.faults,
            "resumed": self.resumed,
            "virtual_s": self.virtual_s,
            "ends": dict(self.ends),
            "kinds": dict(self.kinds),
            "exercised": dict(self.exercised),
        }

    @staticmethod
    def from_plain(plain: dict[str, Any]) -> "Tally":
        fields: dict[str, Any] = {
            name: Counter(each) if isinstance(each, dict) else each for name, each in plain.items()
        }
        return Tally(**fields)

    def lines(self) -> list[str]:
        """For people."""
        ends = ", ".join(f"{count:,} {name}" for name, count in self.ends.most_common())
        kinds = ", ".join(f"{count:,} {name}" for name, count in self.kinds.most_common())
        return [
            f"{self.seeds:,} seeds, {self.requests:,} requests, {self.faults:,} faults, "
            f"{self.virtual_s / 3600:,.1f} hours of virtual time",
            f"requests: {ends}",
            f"calls of clients that took a stream up again: {self.resumed:,}",
            f"faults: {kinds}",
            "exercised:",
            *(f"{count:12,}  {what}" for what, count in sorted(self.exercised.items())),
        ]
