"""Cores for every process: disjoint while there are enough."""

from hypothesis import given
from hypothesis import strategies as st

from baton.launch.devices import Machine, plan_cores

counts = st.integers(1, 6)


def test_core_plan_gives_spare_core_to_router() -> None:
    plan = plan_cores([0, 1, 2], prefill=1, decode=1)
    assert (plan.decode, plan.prefill, plan.router) == (((0,),), ((1,),), (2,))


def test_core_plan_gives_several_routers_a_core_each_if_workers_leave_them() -> None:
    plan = plan_cores(range(8), prefill=1, decode=1, routers=3)
    assert (plan.decode, plan.prefill, plan.router) == (((0, 1),), ((2, 3, 4),), (5, 6, 7))
    crowded = plan_cores([0, 1, 2], prefill=1, decode=1, routers=3)
    assert (crowded.decode, crowded.prefill, crowded.router) == (((0,),), ((1,),), (2,))


def test_default_number_of_routers_follows_workers_and_cores() -> None:
    laptop = Machine(cores=tuple(range(8)), memory_bytes=2**34)
    assert [laptop.router_count(workers) for workers in (1, 2, 64)] == [1, 1, 1]
    many = Machine(cores=tuple(range(64)), memory_bytes=2**40)
    assert [many.router_count(workers) for workers in (2, 15, 16, 32, 64)] == [1, 1, 2, 4, 8]
    box = Machine(cores=tuple(range(192)), memory_bytes=2**40, gpu_free_bytes=(2**37,) * 8)
    assert [box.router_count(workers) for workers in (1, 2, 8, 64)] == [1, 2, 8, 16]
    small = Machine(cores=tuple(range(16)), memory_bytes=2**40, gpu_free_bytes=(2**37,) * 8)
    assert small.router_count(8) == 2


def test_core_plan_without_prefill_gives_decode_all_cores() -> None:
    plan = plan_cores([0, 1, 2, 3], prefill=0, decode=2)
    assert (plan.decode, plan.prefill) == (((0, 1), (2, 3)), ())
    assert plan.router == plan.transfer == (0, 1, 2, 3)


def test_core_plan_gives_remainder_to_prefill() -> None:
    plan = plan_cores(range(8), prefill=1, decode=1)
    assert (plan.decode, plan.prefill, plan.router) == (((0, 1, 2),), ((3, 4, 5, 6),), (7,))


@given(cores=st.lists(st.integers(0, 500), min_size=1, max_size=40, unique=True), prefill=counts, decode=counts)
def test_core_plan_with_enough_cores_is_disjoint(cores: list[int], prefill: int, decode: int) -> None:
    plan = plan_cores(cores, prefill, decode)
    groups = [*plan.decode, *plan.prefill]
    assert (len(plan.decode), len(plan.prefill)) == (decode, prefill)
    assert all(group and set(group) <= set(cores) for group in [*groups, plan.router])
    if len(cores) >= prefill + decode:
        used = [core for group in groups for core in group]
        assert len(used) == len(set(used))
        assert not prefill or not set(plan.router) & {core for group in plan.decode for core in group}
    if len(cores) > prefill + decode:
        assert set(used) | set(plan.router) == set(cores)


@given(cores=st.integers(1, 5), prefill=counts, decode=counts)
def test_core_plan_with_few_cores_shares_evenly(cores: int, prefill: int, decode: int) -> None:
    plan = plan_cores(range(cores), prefill, decode)
    if cores < prefill + decode:
        uses = [sum(core in group for group in [*plan.decode, *plan.prefill]) for core in range(cores)]
        assert max(uses) - min(uses) <= 1
