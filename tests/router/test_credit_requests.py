"""What a router asks decode workers to lend it."""

from dataclasses import replace

import pytest

from baton.process.registry.worker_record import WorkerRole
from baton.router.admission.queue import CreditRequest, CreditRequester, Unmet, credit_request
from baton.router.types.placement import PlacementRequest, WorkerView

SHARE = WorkerView("d0", WorkerRole.DECODE, b"f", total_blocks=100, total_slots=8, limit_blocks=50, limit_slots=4)
REQUEST = PlacementRequest(b"f", block_tokens=32, prompt_tokens=2500, max_tokens=60, choices=1)  # 80 blocks


def test_a_request_larger_than_the_share_is_asked_for() -> None:
    assert credit_request(Unmet(REQUEST, [SHARE]), None) == CreditRequest("d0", 80, 1)
    wide = replace(REQUEST, prompt_tokens=32, choices=6)
    assert credit_request(Unmet(wide, [SHARE]), None) == CreditRequest("d0", wide.charged_blocks, 6)


@pytest.mark.parametrize(
    "enough",
    [
        replace(SHARE, endpoint="d1", limit_blocks=80),  # what we have there ends sooner or later
        replace(SHARE, endpoint="d1", limit_blocks=80, used_blocks=79),
    ],
)
def test_nothing_is_asked_for_where_the_share_of_some_worker_will_do(enough: WorkerView) -> None:
    assert credit_request(Unmet(REQUEST, [SHARE, enough]), None) is None


@pytest.mark.parametrize(
    "unfit",
    [replace(SHARE, total_blocks=79), replace(SHARE, fingerprint=b"other"), replace(SHARE, role=WorkerRole.PREFILL)],
)
def test_nothing_is_asked_of_workers_that_could_not_take_it(unfit: WorkerView) -> None:
    assert credit_request(Unmet(REQUEST, [unfit]), None) is None


def test_the_worker_that_lacks_least_is_asked_and_then_remains_so() -> None:
    nearer = replace(SHARE, endpoint="d1", limit_blocks=60)
    assert credit_request(Unmet(REQUEST, [SHARE, nearer]), None) == CreditRequest("d1", 80, 1)
    assert credit_request(Unmet(REQUEST, [SHARE, nearer]), "d0") == CreditRequest("d0", 80, 1)


def test_credit_beyond_a_whole_worker_is_not_asked_for() -> None:
    wide = replace(REQUEST, prompt_tokens=32, max_tokens=2000, choices=8)
    few = replace(SHARE, total_blocks=64, limit_blocks=32)
    assert wide.charged_blocks > few.total_blocks >= wide.longest_blocks
    assert credit_request(Unmet(wide, [few]), None) == CreditRequest("d0", 64, 8)


def test_a_worker_is_told_once_and_told_when_it_is_over() -> None:
    told: list[CreditRequest] = []
    credit_requests = CreditRequester(told.append)
    credit_requests.follow(None)
    for _ in range(2):
        credit_requests.follow(Unmet(REQUEST, [SHARE]))
    assert told == [CreditRequest("d0", 80, 1)]
    credit_requests.follow(Unmet(REQUEST, [replace(SHARE, endpoint="d1")]))
    credit_requests.follow(None)
    credit_requests.follow(None)
    assert told[1:] == [CreditRequest("d0", 0, 0), CreditRequest("d1", 80, 1), CreditRequest("d1", 0, 0)]
