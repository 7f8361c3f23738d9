"""Which adapters this router serves, and which of them a request means by the name of its model. Pure."""

from collections.abc import Sequence, Set

from router.cluster import Worker
from router.worker import Adapter, WorkerRole
from service.errors import NotFound


def served_adapters(workers: Sequence[Worker], fingerprint: bytes, needed: Set[WorkerRole]) -> tuple[Adapter, ...]:
    """Those that workers of every needed role have, of this model; sorted by name.

    Where workers have different ones under a name, as while they are replaced, it is the one that more of them have.
    """
    holders: dict[Adapter, list[WorkerRole]] = {}
    for worker in workers:
        if worker.held and worker.description is not None and worker.description.fingerprint == fingerprint:
            for adapter in worker.description.adapters:
                holders.setdefault(adapter, []).append(worker.role)
    by_name: dict[str, Adapter] = {}
    whole = [adapter for adapter, roles in holders.items() if needed <= set(roles)]
    for adapter in sorted(whole, key=lambda adapter: (len(holders[adapter]), adapter.digest)):
        by_name[adapter.name] = adapter
    return tuple(by_name[name] for name in sorted(by_name))


def choose_adapter(name: str, model: str, adapters: Sequence[Adapter]) -> Adapter | None:
    """None where the name is the model's own, or empty. Raises: NotFound."""
    if name in ("", model):
        return None
    for adapter in adapters:
        if adapter.name == name:
            return adapter
    raise NotFound("model", name)
