"""Choice of the worker that takes over what a leaving worker keeps for a session. Pure."""

from collections.abc import Iterable, Mapping

from baton.router.placement.cluster import Worker


def taker(workers: Iterable[Worker], leaving: Worker, blocks: int, handed: Mapping[str, int]) -> str | None:
    """Endpoint of the worker with most unprotected blocks; None where none has so many.

    Only workers of the same role, whose KV has the same names, can. `handed`: blocks that each was given since its last
    report.
    """
    description = leaving.description
    spare: dict[str, int] = {}
    for worker in workers:
        other, report = worker.description, worker.report
        if worker is leaving or not worker.available or description is None or other is None or report is None:
            continue
        if other.role is description.role and other.fingerprint == description.fingerprint:
            pages, protected = report.pages, report.sessions.protected_blocks
            spare[worker.endpoint] = pages.free + pages.cached - protected - handed.get(worker.endpoint, 0)
    best = max(spare, key=lambda endpoint: (spare[endpoint], endpoint), default=None)
    return best if best is not None and spare[best] >= blocks else None
