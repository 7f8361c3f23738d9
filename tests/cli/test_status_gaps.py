"""What a router that is ready lacks, as `baton status` says it."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest

from baton.cli.status import headline
from baton.client.cluster import ClusterStatus
from baton.client.convert import value_from
from baton.process.registry.worker_record import WorkerRole
from baton.router.admin.service import AdminServicer
from baton.router.cache.replica import Caches
from baton.router.cache.tiers import TierDirectories
from baton.router.dispatcher import RequestCounts
from baton.router.placement.cluster import Departures, Worker
from baton.router.trace.latency import RecentLatency, WorkerTokenTimes


@pytest.mark.parametrize(
    ("connected", "registry", "detail"),
    [
        ((WorkerRole.PREFILL, WorkerRole.DECODE), True, ""),
        ((WorkerRole.PREFILL,), True, "no decode worker is connected"),
        ((), True, "no prefill worker is connected; no decode worker is connected"),
        (
            (WorkerRole.PREFILL, WorkerRole.DECODE),
            False,
            "the registry does not answer; the router keeps the workers it knows (timed out)",
        ),
    ],
)
async def test_ready_router_names_missing_workers(
    connected: tuple[WorkerRole, ...], registry: bool, detail: str
) -> None:
    workers = tuple(Worker(f"{role}:1", role, connected=role in connected) for role in WorkerRole)
    servicer: Any = AdminServicer(
        SimpleNamespace(  # type: ignore[arg-type]
            workers=workers,
            roles_seen=frozenset(),
            caches=Caches(),
            tiers=TierDirectories(),
            departures=defaultdict(Departures),
            name_of=str,
        ),
        SimpleNamespace(  # type: ignore[arg-type]
            active=0,
            queued=0,
            version="",
            accounts=SimpleNamespace(counts=RequestCounts()),
            tool_format="",
            readiness=SimpleNamespace(ready=True, detail="", needed=frozenset(WorkerRole), refused={}),
        ),
        SimpleNamespace(),  # type: ignore[arg-type]
        SimpleNamespace(latency=RecentLatency(), token_times=WorkerTokenTimes()),  # type: ignore[arg-type]
        peer_routers=None,
        planning=None,
        registry_problem=lambda: "" if registry else "timed out",
    )
    answer = value_from(ClusterStatus, await servicer.GetStatus(None, None))
    assert (answer.ready, answer.detail) == (True, detail)
    assert headline(answer).startswith("ready ·" if not detail else f"degraded: {detail} ·")
