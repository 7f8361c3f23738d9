"""Who may change its role: never the last of it, never who cannot, never who is on its way."""

from dataclasses import replace

import pytest

from baton.process.errors import FailedPrecondition, NotFound
from baton.process.registry.worker_record import WorkerRole
from baton.router.placement.cluster import Worker
from baton.router.placement.planner import endpoint_to_change
from baton.router.types.worker import ModelDescription, PoolBlocks, WorkerDescription, WorkerReport

MODEL = ModelDescription("m", "/m", 1000, 100, "float32", 4)
REPORT = WorkerReport(100, 8, PoolBlocks(100, 100, 0, 0, 0, 0), 0, 0, 0, draining=False, steps=0)
BOTH = (WorkerRole.PREFILL, WorkerRole.DECODE)


def worker(name: str, roles: tuple[WorkerRole, ...] = BOTH, model: bytes = b"f", draining: bool = False) -> Worker:
    role = WorkerRole(name.partition("-")[0])
    description = WorkerDescription(name, role, 1, model, MODEL, 100, 8, roles=roles)
    return Worker(f"{name}:1", role, True, True, description, 1, replace(REPORT, draining=draining))


def test_one_of_two_may_change_and_one_that_is_so_already_need_not() -> None:
    workers = [worker("prefill-0"), worker("prefill-1"), worker("decode-0")]
    assert endpoint_to_change(workers, "prefill-1", WorkerRole.DECODE) == "prefill-1:1"
    assert endpoint_to_change(workers, "decode-0", WorkerRole.DECODE) is None


@pytest.mark.parametrize(
    "workers",
    [
        [worker("decode-0"), worker("prefill-0")],  # the last one
        [worker("decode-0"), worker("decode-1", draining=True)],  # the other one is leaving
        [worker("decode-0"), worker("decode-1", model=b"g")],  # the other one serves another model
        [worker("decode-0", roles=()), worker("decode-1")],  # it has one for life
        [worker("decode-0", draining=True), worker("decode-1")],  # it is changing already
    ],
)
def test_otherwise_it_is_refused(workers: list[Worker]) -> None:
    with pytest.raises(FailedPrecondition):
        endpoint_to_change(workers, "decode-0", WorkerRole.PREFILL)


def test_a_worker_that_nobody_knows_is_not_found() -> None:
    with pytest.raises(NotFound):
        endpoint_to_change([worker("decode-0")], "decode-7", WorkerRole.PREFILL)
