"""Which workers take work now, and which of them are worth a look. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from router.shortlist import shortlist
from router.worker import WorkerRole


class Named(Protocol):
    @property
    def endpoint(self) -> str: ...

    @property
    def role(self) -> WorkerRole: ...


Known = TypeVar("Known", bound=Named)


@dataclass(frozen=True, slots=True)
class Able(Generic[Known]):
    """The workers that take work now; found out again when one comes, goes, or begins to drain."""

    workers: tuple[Known, ...]
    roles: Mapping[str, WorkerRole]
    alike: Mapping[WorkerRole, tuple[str, ...]]

    @classmethod
    def of(cls, workers: Iterable[Known]) -> "Able[Known]":
        able = tuple(workers)
        roles = {worker.endpoint: worker.role for worker in able}
        return cls(
            able, roles, {wanted: tuple(n for n, role in roles.items() if role is wanted) for wanted in WorkerRole}
        )

    def shortlist(self, role: WorkerRole, found: Mapping[str, int], turn: int) -> Sequence[str]:
        known = {name: blocks for name, blocks in found.items() if self.roles.get(name) is role}
        return shortlist(self.alike[role], known, turn)
