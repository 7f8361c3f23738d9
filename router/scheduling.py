"""The shared state of one router's requests: where they are placed, and what is remembered across them."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from router.admission import AdmissionQueue
from router.cluster import Cluster
from router.fleet import Fleet
from router.poison import Quarantine, Suspects


@dataclass(frozen=True, slots=True)
class Scheduling:
    """`attempt_ids` never repeat within this process. `attempts` of a request may fail one after another."""

    cluster: Cluster
    fleet: Fleet
    queue: AdmissionQueue
    attempt_ids: Iterator[int]
    attempts: int = 6
    quarantine: Quarantine = field(default_factory=Quarantine)
    suspects: Suspects = field(default_factory=Suspects)
