"""Where prompts without an answer go, and whose turn it is beside prompts with one."""

from dataclasses import replace

import pytest

from baton.process.registry.worker_record import WorkerRole
from baton.router.placement.decide import (
    Decision,
    LocalPrefill,
    NoPrefillWorker,
    NoRoom,
    Placement,
    decide,
    excluded,
    place,
)
from baton.router.placement.eligible import POOLED_AHEAD_MS
from baton.router.types.placement import PlacementRequest, WorkerRates, WorkerView
from baton.versions import OWN, POOLING_PROTOCOL
from tests.fixtures.router_defaults import make_policy
from tests.router.test_admission import Room

POLICY, LOCAL = make_policy(NoPrefillWorker.QUEUE), make_policy(NoPrefillWorker.LOCAL)
POOLED = PlacementRequest(fingerprint=b"f", block_tokens=4, prompt_tokens=8, max_tokens=0, choices=0, pooled=True)
RATES = WorkerRates(prefill_tokens_per_s=1000.0)
PREFILL = WorkerView("p0", WorkerRole.PREFILL, b"f", 100, 0, 0, 0, protocol=POOLING_PROTOCOL, rates=RATES)
DECODE = WorkerView("d0", WorkerRole.DECODE, b"f", 100, 8, 0, 0, protocol=POOLING_PROTOCOL)
FULL_TOKENS = int(POOLED_AHEAD_MS)  # at one a millisecond


def test_prefill_worker_is_chosen_without_decode_credit() -> None:
    placement = place(POOLED, [PREFILL, DECODE], POLICY)
    assert isinstance(placement, Placement)
    assert placement.endpoints == ("p0",) and placement.computes_for_others
    assert placement.local_prefill is LocalPrefill.POOLED


def test_decode_worker_computes_a_vector_without_prefill_workers() -> None:
    busy = replace(DECODE, used_blocks=100, limit_blocks=100, used_slots=8, limit_slots=8)
    older = replace(PREFILL, protocol=POOLING_PROTOCOL - 1)
    placement = place(POOLED, [older, busy], LOCAL)
    assert isinstance(placement, Placement)
    assert placement.endpoints == ("d0",) and not placement.computes_for_others
    assert place(POOLED, [PREFILL, DECODE], LOCAL) == place(POOLED, [PREFILL, DECODE], POLICY)


@pytest.mark.parametrize(
    ("worker", "reason"),
    [
        (replace(DECODE, protocol=POOLING_PROTOCOL - 1), NoRoom.NO_PREFILL_WORKER),
        (replace(DECODE, total_blocks=1), NoRoom.TOO_LONG),
        (replace(DECODE, pending_prompt_tokens=FULL_TOKENS + 1, rates=RATES), NoRoom.NO_CREDIT),
    ],
)
def test_without_a_decode_worker_that_can_the_reason_is_named(worker: WorkerView, reason: NoRoom) -> None:
    assert decide(POOLED, [worker], LOCAL) is reason


@pytest.mark.parametrize(
    ("workers", "reason"),
    [
        ([DECODE], NoRoom.NO_PREFILL_WORKER),
        ([replace(PREFILL, protocol=POOLING_PROTOCOL - 1), DECODE], NoRoom.NO_POOLING_WORKER),
        ([replace(PREFILL, total_blocks=1), DECODE], NoRoom.TOO_LONG),
        ([replace(PREFILL, tokens_in_flight=FULL_TOKENS + 1), DECODE], NoRoom.NO_CREDIT),
    ],
)
def test_without_a_worker_that_can_the_reason_is_named(workers: list[WorkerView], reason: NoRoom) -> None:
    assert decide(POOLED, workers, POLICY) is reason


def test_newer_worker_with_much_ahead_is_not_replaced_by_an_older_one() -> None:
    older = replace(PREFILL, endpoint="p1", protocol=POOLING_PROTOCOL - 1)
    busy = replace(PREFILL, tokens_in_flight=FULL_TOKENS)
    decision = decide(POOLED, [older, busy, DECODE], POLICY)
    assert isinstance(decision, Decision) and decision.decode.worker is busy
    assert excluded(POOLED, decision, older) == "its release makes no vectors"
    assert excluded(POOLED, decision, DECODE) == "there is no answer to decode"


def test_failed_worker_is_avoided_while_there_is_another() -> None:
    request = replace(POOLED, avoided_prefill=frozenset({"p0"}))
    other = replace(PREFILL, endpoint="p1", tokens_in_flight=5)
    placement = place(request, [PREFILL, other], POLICY)
    assert isinstance(placement, Placement) and placement.computing == "p1"
    assert isinstance(place(request, [PREFILL], POLICY), Placement)


async def test_vector_is_charged_on_the_prefill_worker_alone_until_it_is_released() -> None:
    room = Room(slots=1, versions=OWN)
    room.ask(1, request=POOLED)
    assert room.charges == [{1}, set()]
    (prefill, _) = room.cluster.workers
    assert (prefill.charges.tokens, prefill.charges.blocks, prefill.charges.slots) == (8, 0, 0)
    room.cluster.release(1, "prefill")
    assert prefill.charges.tokens == 0


async def test_answers_waiting_for_credit_neither_block_vectors_nor_are_overtaken() -> None:
    room = Room(slots=1, versions=OWN)
    room.ask(1, 2)
    room.ask(*range(3, 9), request=POOLED)
    assert room.placed == [1, *range(3, 9)]
    room.free(1)
    assert room.charges[1] == {2}


async def test_vectors_wait_in_the_router_while_the_worker_has_enough_ahead() -> None:
    room = Room(slots=8, versions=OWN)
    prefill = room.cluster.workers[0]
    room.ask(1, request=replace(POOLED, prompt_tokens=200))
    ahead_tokens = int(POOLED_AHEAD_MS * room.cluster.rates.of("prefill").prefill_tokens_per_s / 1e3)
    prefill.charges.tokens = ahead_tokens + 1  # as if it had been longer than a test's pool allows
    prefill.changed()
    room.ask(2, request=POOLED)
    room.ask(3)
    assert room.placed == [1, 3], "the prompt of an answer is not held up"
    room.cluster.release(1, "prefill")
    prefill.charges.tokens = 0
    prefill.changed()
    room.queue.pump()
    assert room.placed == [1, 3, 2]
