"""Table of a worker's adapters and sets of weights, with the reason to keep each. Pure.

An adapter is prepared, listed, retired and removed, in this order; adapters loaded at start stay. Several adapters may
have one name: a new one is listed while requests still use the previous one.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from baton.process.registry.worker_record import WEIGHTS, ListRank, list_rank, newest_version


class AdapterOrigin(Enum):
    """Reason to keep an adapter loaded."""

    STARTED = auto()
    """Loaded when the worker started."""
    PREPARED = auto()
    """Prepared for a list that has not arrived yet."""
    LISTED = auto()
    """Listed: new requests may choose it."""
    RETIRED = auto()
    """No longer listed; kept for running requests."""


@dataclass(frozen=True, slots=True)
class AdapterKey:
    """Identity of an adapter: adapters with equal keys compute equal results."""

    name: str
    digest: str


@dataclass(slots=True)
class Loaded:
    key: AdapterKey
    number: int  # number in the engine; 0: weights that the worker was started with
    kept: AdapterOrigin


@dataclass(frozen=True, slots=True)
class Listed:
    """Entry of the routers' adapter list."""

    key: AdapterKey
    path: str  # folder of the adapter
    grace_s: float = 0.0  # time left to requests with the previous weights; enforced by routers


def rank_of(version: int, listed: Iterable[Listed]) -> ListRank:
    return list_rank(version, ((each.key.name, each.key.digest) for each in listed))


class AdapterTable:
    """Loaded adapters, and the newest list of required ones."""

    def __init__(self) -> None:
        self._loaded: dict[AdapterKey, Loaded] = {}
        self._had: dict[str, set[str]] = {}  # digests of all adapters ever loaded here, by name
        self._own_weights: AdapterKey | None = None  # weights that the worker was started with
        self.rank = ListRank()
        """Rank of the newest list."""
        self.listed: tuple[Listed, ...] = ()
        self.refused: dict[str, str] = {}
        """Reasons why listed adapters could not be loaded, by name."""

    def add(self, key: AdapterKey, number: int, kept: AdapterOrigin) -> None:
        self._loaded[key] = Loaded(key, number, kept)
        self._had.setdefault(key.name, set()).add(key.digest)

    def add_own_weights(self, digest: str) -> None:
        """Add the weights that the worker was started with, under number 0."""
        self._own_weights = AdapterKey(WEIGHTS, digest)
        self.add(self._own_weights, 0, AdapterOrigin.STARTED)

    @property
    def version(self) -> int:
        """Return the version of the newest adapter list."""
        return self.rank.version

    @property
    def own_weights_freed(self) -> bool:
        return self._own_weights is not None and self._own_weights not in self._loaded

    @property
    def replaces_weights(self) -> bool:
        """Return whether a listed set of weights is loaded; new requests use it."""
        return any(each.key.name == WEIGHTS and each.key in self._loaded for each in self.listed)

    @property
    def weights(self) -> list[Loaded]:
        """Return the loaded sets of weights."""
        return [each for each in self._loaded.values() if each.key.name == WEIGHTS]

    @property
    def adapters(self) -> list[Loaded]:
        return [each for each in self._loaded.values() if each.key.name != WEIGHTS]

    def find(self, key: AdapterKey) -> Loaded | None:
        return self._loaded.get(key)

    def of(self, *kept: AdapterOrigin) -> list[Loaded]:
        return [each for each in self._loaded.values() if each.kept in kept]

    def drop(self, loaded: Loaded) -> None:
        del self._loaded[loaded.key]

    def number(self, name: str, digest: str = "") -> int:
        """Return the engine's number of the adapter that a request names; 0 for an empty name.

        `digest`: digest that the request names; empty if the router sends no digests. Raises: ValueError.
        """
        if not name:
            if self.own_weights_freed:
                raise ValueError("the original weights of this worker were replaced and freed")
            return 0
        had = self._had.get(name, set())
        if not digest and len(had) > 1:
            raise ValueError(f"adapter {name!r} is ambiguous: several had this name, and the router sent no digest")
        loaded = self._loaded.get(AdapterKey(name, digest or "".join(had)))
        if loaded is None or loaded.kept is AdapterOrigin.PREPARED:
            raise ValueError(f"adapter {name!r} is not loaded on this worker")
        return loaded.number

    def take_list(self, version: int, listed: Iterable[Listed]) -> bool:
        """Apply an adapter list and return True; afterwards, `missing` has the listed adapters that are not loaded.

        Ignore the list and return False if its version is in the future or not newer than the current list's.
        """
        listed = tuple(listed)
        rank = rank_of(version, listed)
        if rank <= self.rank or version > newest_version():
            return False
        self.rank, self.listed = rank, listed
        wanted = {each.key for each in self.listed}
        self.refused = {}
        replaces = any(key.name == WEIGHTS for key in wanted)
        for loaded in self._loaded.values():
            if loaded.kept is AdapterOrigin.STARTED and not (replaces and loaded.key == self._own_weights):
                continue
            if loaded.key in wanted:
                loaded.kept = AdapterOrigin.LISTED
            elif loaded.kept is not AdapterOrigin.PREPARED:
                loaded.kept = AdapterOrigin.RETIRED
        return True

    @property
    def missing(self) -> list[Listed]:
        return [each for each in self.listed if each.key not in self._loaded]
