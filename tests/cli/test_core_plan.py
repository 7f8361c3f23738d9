"""Cores for every process: disjoint while there are enough."""

from hypothesis import given
from hypothesis import strategies as st

from baton.launch.devices import plan_cores, write_cores

counts = st.integers(1, 6)


def test_two_cores_keep_everything_but_decode_off_decodes_core() -> None:
    plan = plan_cores([0, 1], prefill=1, decode=1)
    assert plan.decode == ((0,),)
    assert plan.prefill == ((1,),)
    assert plan.router == plan.transfer == (1,)


def test_a_core_that_is_left_goes_to_the_router() -> None:
    plan = plan_cores([0, 1, 2], prefill=1, decode=1)
    assert (plan.decode, plan.prefill, plan.router) == (((0,),), ((1,),), (2,))


def test_without_prefill_workers_decode_computes_on_all_cores_and_the_router_shares_them() -> None:
    plan = plan_cores([0, 1, 2, 3], prefill=0, decode=2)
    assert (plan.decode, plan.prefill) == (((0, 1), (2, 3)), ())
    assert plan.router == plan.transfer == (0, 1, 2, 3)


def test_cores_that_do_not_divide_go_to_prefill() -> None:
    plan = plan_cores(range(8), prefill=1, decode=1)
    assert (plan.decode, plan.prefill, plan.router) == (((0, 1, 2),), ((3, 4, 5, 6),), (7,))


@given(cores=st.lists(st.integers(0, 500), min_size=1, max_size=40, unique=True), prefill=counts, decode=counts)
def test_workers_are_disjoint_when_there_are_enough_cores_and_never_without_one(
    cores: list[int], prefill: int, decode: int
) -> None:
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
def test_too_few_cores_are_shared_evenly(cores: int, prefill: int, decode: int) -> None:
    plan = plan_cores(range(cores), prefill, decode)
    if cores < prefill + decode:
        uses = [sum(core in group for group in [*plan.decode, *plan.prefill]) for core in range(cores)]
        assert max(uses) - min(uses) <= 1


def test_cores_are_written_as_the_processes_read_them() -> None:
    assert write_cores((0, 2, 3)) == "0,2,3"
