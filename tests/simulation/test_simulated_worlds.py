"""Whole worlds: what must hold does, a seed is a seed, and bugs are found."""

import asyncio
import gc
import random
from collections.abc import Iterator

import pytest

from cli.commands import simulate
from simulation.client import End
from simulation.loop import SimulatedLoop, SimulatedProcess
from simulation.network import Network, Pipe
from simulation.planted import PLANTS, planted
from simulation.world import Options, run_seed

SEEDS = range(40, 52)


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> Iterator[None]:
    """Each world collects its garbage: only its own should have to be looked at."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def test_every_invariant_holds_in_some_worlds() -> None:
    results = [run_seed(seed, Options(requests=3)) for seed in SEEDS]
    assert [(result.seed, result.violation) for result in results if result.violation is not None] == []
    assert sum(len(result.faults) for result in results) > 5, "nothing befell them"
    answered = sum(history.end is End.ANSWERED for result in results for history in result.histories)
    assert answered > len(SEEDS), "hardly anything was answered"


def test_the_same_seed_is_the_same_run() -> None:
    digests = [result.trace.digest for _ in range(2) if (result := run_seed(41, Options(requests=3))).trace is not None]
    assert len(digests) == 2 and digests[0] == digests[1]


@pytest.mark.parametrize("plant, seed", [("dropped-pin", 1), ("reused-transfer-id", 1), ("off-by-one-offset", 3)])
def test_a_planted_bug_is_found(plant: str, seed: int) -> None:
    with planted(plant):
        assert any(run_seed(each, Options(requests=6)).violation is not None for each in range(seed, seed + 8))


def test_every_plant_is_known_to_the_command() -> None:
    assert sorted(PLANTS) == sorted(simulate.PLANTS)


def test_a_cut_link_holds_back_what_is_sent_and_keeps_its_order() -> None:
    loop = SimulatedLoop(random.Random(1))
    network = Network(loop, random.Random(2), base_s=0.001, jitter_s=0.1)
    arrived: list[int] = []

    async def scenario() -> None:
        pipe = Pipe(network, "a", "b")
        network.cut("a", "b")
        for number in range(10):
            pipe.send(lambda number=number: arrived.append(number))  # type: ignore[misc]
        await asyncio.sleep(1.0)
        assert arrived == []
        network.heal("a", "b")
        assert arrived == list(range(10))

    loop.run_until_complete(loop.create_task(scenario(), context=SimulatedProcess("test").context))
    loop.forget()
    loop.close()
