"""Invariants of every world: answers, block ownership, contents of caches and files, released resources."""

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from baton.kvtransfer.tier.records import HEADER_BYTES, SegmentFormat
from baton.kvtransfer.tier.staging import Staging
from baton.lab.simulation.client import RequestEnding, SimulatedHistory, wrong_answer
from baton.lab.simulation.faults import SimulatedFaultKind
from baton.lab.simulation.files.tier import IDENTITY
from baton.lab.simulation.host import FINGERPRINT, SimulatedHost
from baton.lab.simulation.model import expected_answer, kv_numbers, of_group
from baton.router.request.attempt import POISON_DEATHS
from baton.text.block_hash import block_hashes, root_hash

if TYPE_CHECKING:
    from baton.lab.simulation.processes import SimulatedMachine
    from baton.lab.simulation.world import World

STUCK_S = 12.0  # longest time of a request, from its start or the end of all faults, whichever is later
HURRIED_S = 5.0  # requests with less time left may be refused or not be retried
_HURRY = {"RESOURCE_EXHAUSTED", "UNAVAILABLE", "DRAINING", "NOT_READY"}
_SAYS_CORRUPT = re.compile(r"checksum mismatch reported by a reader|KV read from \S+ is corrupt")
_SAYS_CHANGED = re.compile(r"cached KV is corrupt")
_SAYS_DEADLY = re.compile(r"request \S+ quarantined: its workers died")
LATE_S = 3.0  # longest time from a request's deadline to its end


class Violation(Exception):
    """Violated invariant: the simulation has found a bug."""


def check_all(world: "World", histories: Sequence[SimulatedHistory]) -> None:
    """Check the answers and ends of all requests. Call it after the last request has ended. Raises: Violation."""
    for history in histories:
        fault = wrong_answer(history) or _wrong_end(world, history)
        if fault is not None:
            raise Violation(f"request {history.request.number}: {fault}")
    nonfinite = sum(history.cause == "NONFINITE_LOGITS" for history in histories)
    poisoned = sum(fault.kind is SimulatedFaultKind.POISON for fault in world.faults)
    if nonfinite > poisoned:
        raise Violation(f"{nonfinite} requests failed with non-finite logits, but only {poisoned} steps were poisoned")
    if not world.faults and world.trace.retried:
        raise Violation(f"an attempt failed without a fault: {world.trace.retried[0]}")


def _wrong_end(world: "World", history: SimulatedHistory) -> str | None:
    request = history.request
    if history.ended_s is None or history.end is None:
        return "it never ended"
    took_s = history.ended_s - history.begun_s
    if took_s > request.deadline_s + LATE_S:
        return f"it ended {took_s - request.deadline_s:.1f} s after its deadline"
    waited_s = history.ended_s - max(history.begun_s, world.mended_s)
    if waited_s > STUCK_S:
        return f"it ended ({history.cause or history.end.name}) {waited_s:.1f} s after the last fault"
    if history.end is not RequestEnding.FAILED or took_s >= request.deadline_s - 0.01:
        return None
    if history.cause == "NONFINITE_LOGITS":
        return None  # check_all compares the number of such failures with that of poisoned steps
    if history.cause in _HURRY and min(request.deadline_s, request.deadline_s - took_s) < HURRIED_S:
        return None
    if history.cause == "RESOURCE_EXHAUSTED" and world.faults and not history.events:
        return None  # after a stall, measured rates are low, and the deadline can seem too short
    if history.cause == "POISON" and worker_deaths(world) >= POISON_DEATHS:
        return None  # known limitation: requests are also blamed for unrelated deaths of workers
    return f"it failed with {history.cause}: {history.message}"


def worker_deaths(world: "World") -> int:
    """Return the number of worker processes that died, from any cause."""
    return sum(len(machine.lives) - machine.is_up for machine in world.workers)


def check_pages(world: "World") -> None:
    """Check that every block of every worker is free, held or cached, and only one of these.

    Raises: Violation.
    """
    for machine in world.workers:
        host = None if machine.life is None else machine.life.host
        if host is not None:
            try:
                host.blocks.check_conservation()
            except AssertionError as error:
                raise Violation(f"{machine.name}: {error}") from error


def check_prompt_blocks(world: "World") -> None:
    """Check that prompts took their blocks chunk by chunk, and the oldest one always. Raises: Violation."""
    if world.prompt_blocks.fault is not None:
        raise Violation(world.prompt_blocks.fault)


def unexpected_error_logs(world: "World") -> list[str]:
    """Return the logged errors, except those that bit flips or several deaths of workers cause."""
    expected = [_SAYS_CORRUPT] if any(fault.kind is SimulatedFaultKind.FLIP for fault in world.faults) else []
    expected += [_SAYS_CHANGED] if any(host.flipped for host in _hosts(world)) else []
    expected += [_SAYS_DEADLY] if worker_deaths(world) >= POISON_DEATHS else []
    return [line for line in world.trace.error_logs if not any(said.search(line) for said in expected)]


def _hosts(world: "World") -> Iterator[SimulatedHost]:
    """Yield the hosts of all worker processes, including processes that have ended."""
    return (life.host for machine in world.workers for life in machine.lives if life.host is not None)


def check_quiet(world: "World") -> str | None:
    """Describe a resource that is still held although there are no requests; None if all resources are released."""
    return next(_held(world), None)


def _held(world: "World") -> Iterator[str]:
    for machine in world.workers:
        yield from _held_by_worker(machine)
    for machine in world.routers:
        yield from _held_by_router(machine)
        yield from _miscounted(world, machine)


def _held_by_worker(machine: "SimulatedMachine") -> Iterator[str]:
    life = machine.life
    if life is None or life.host is None or life.role is None:
        yield f"{machine.name} is down"
        return
    pool = life.host.blocks
    if pool.counts.held:
        yield f"{machine.name} holds {pool.counts.held} pages"
    if life.role.service.busy:
        yield f"{machine.name} has requests in its request table"
    transfers = len(life.role.transfers._table)
    if transfers:
        yield f"{machine.name} has {transfers} transfers open"


def _held_by_router(machine: "SimulatedMachine") -> Iterator[str]:
    router = None if machine.life is None else machine.life.router
    if router is None:
        yield f"{machine.name} is down"
        return
    if router.queue.waiting:
        yield f"{machine.name} has {router.queue.waiting} requests waiting"
    if router.dispatcher.active:
        yield f"{machine.name} has {router.dispatcher.active} requests active"
    for worker in router.cluster.workers:
        if worker.charges:
            yield f"{machine.name} charges {len(worker.charges)} attempts to {worker.endpoint}"


def _miscounted(world: "World", machine: "SimulatedMachine") -> Iterator[str]:
    """Yield errors in a router's counts of requests (started, running, ended) and of worker exits."""
    router = None if machine.life is None else machine.life.router
    if router is None:
        return
    counts = router.dispatcher.accounts.counts
    if counts.started != sum(counts.ended.values()) + counts.running:
        yield f"{machine.name} counts {counts.started} requests, and the ends of {sum(counts.ended.values())}"
    for worker in world.workers:
        seen, ended = router.cluster.departures[worker.name], len(worker.lives) - worker.is_up
        if seen.deaths + seen.drains > ended:
            yield f"{machine.name} saw {worker.name} end {seen.deaths + seen.drains} times, of {ended}"


def check_cache_contents(world: "World", histories: Sequence[SimulatedHistory]) -> None:
    """Check that every cached block has the KV of its hash. Raises: Violation.

    Call it while no engine computes a step: blocks are published during a step and written at its end.
    """
    known = _known_blocks(world, histories)
    for machine in world.workers:
        host = None if machine.life is None else machine.life.host
        if host is not None:
            _check_cache(machine.name, host, known)


def _check_cache(name: str, host: SimulatedHost, known: dict[bytes, list[int]]) -> None:
    if host.flipped:
        return  # bits were flipped on purpose, and nothing checks blocks that no request uses
    for block_hash, block in host.blocks._by_hash.items():
        wanted = known.get(block_hash)
        if wanted is not None and not np.array_equal(host.numbers[block], np.array(wanted, dtype=np.uint64)):
            raise Violation(f"{name}: KV of block {block} does not match its hash")


def check_files(world: "World", histories: Sequence[SimulatedHistory]) -> None:
    """Check that every block in files with a valid checksum has the KV of its name. Raises: Violation."""
    known = _known_blocks(world, histories)
    block_bytes = 8 * world.shape.block_tokens
    form, staging = SegmentFormat(IDENTITY, block_bytes), Staging(1, block_bytes)
    for segment, content in world.disk.contents.items():
        for slot in range(form.slots(len(content))):
            record = bytes(content[form.offset(slot) : form.offset(slot + 1)])
            header = form.read_record_header(record[:HEADER_BYTES])
            staging.block(0)[:] = record[HEADER_BYTES:]
            if header is None or header.checksum != staging.checksum(0):
                continue
            wanted = known.get(header.name)
            found = np.frombuffer(record[HEADER_BYTES:], dtype=np.uint64)
            if wanted is not None and not np.array_equal(found, np.array(wanted, dtype=np.uint64)):
                raise Violation(f"{segment}: KV in slot {slot} does not match its name")


def _known_blocks(world: "World", histories: Sequence[SimulatedHistory]) -> dict[bytes, list[int]]:
    """Return the right KV of all prompts and answers of a world, by block hash."""
    size, groups = world.shape.block_tokens, world.shape.groups
    known: dict[bytes, list[int]] = {}
    for history in histories:
        request = history.request
        root = root_hash(FINGERPRINT, "float32", "", request.salt)
        for choice in range(request.made):
            tokens = (*request.asked.token_ids, *expected_answer(request.asked, choice).token_ids)
            numbers = kv_numbers(tokens)
            for index, block_hash in enumerate(block_hashes(root, tokens, size)):
                own = numbers[index * size : (index + 1) * size]
                for group in range(groups.count):
                    known[groups.name(block_hash, group)] = [of_group(number, group) for number in own]
    return known
