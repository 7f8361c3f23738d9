"""Choice of the worker that receives a session's kept blocks from a worker that leaves. Pure."""

from collections.abc import Iterable, Mapping

from baton.router.placement.cluster import Worker


def taker(workers: Iterable[Worker], leaving: Worker, blocks: int, handed: Mapping[str, int]) -> str | None:
    """Return the endpoint of the worker that should receive `blocks` blocks; None if no worker can.

    Candidates are workers with the role and model of `leaving`. The one with the most unprotected blocks is chosen, if
    it has at least `blocks` of them.

    `handed`: number of blocks handed to each worker since the worker's last report.
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
