"""Processes of the last release and of this tree work together, and a rolling upgrade under load fails no request.

`python -m baton.lab.chaos.rolling` upgrades every process, and downgrades it again.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from baton.client import AsyncBatonClient
from baton.lab.chaos.rolling.checkout import check_out, last_release
from baton.versions import RELEASE
from tests.e2e.faulty import SECOND_ROUTER, targets_of
from tests.e2e.oracle import Oracle, ask_transformers, check_answers, make_asked
from tests.e2e.stack import READY_S, Stack, StackProcess, free_ports, make_stack
from tests.e2e.test_rolling_live import answer, keep_asking

OLD = ("router", "prefill-0", "decode-0")
"""Beside one of this tree each."""
NAMELESS = "0.1.0"  # reports no release
ROLLED = ("decode-0", "router")
PROMPTS = 12
ROUNDS = 60  # at most: the router chooses the pair, partly by measured rates
OTHER_LAYOUT = "prefill-2"
CLIENTS = 4
# Every prompt goes through a prefill and a decode worker, which its tokens and salt determine.
FLAGS = ("--local-prefill-tokens", "0", "--no-prefill-worker", "queue", "--placement", "prefix_hash")


@dataclass(frozen=True)
class Served:
    stack: Stack
    oracle: Oracle

    @property
    def targets(self) -> dict[str, str]:
        return dict(zip(("the last release's", "this tree's"), targets_of(self.stack), strict=True))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two routers, 2P+2D; the first of each kind runs the last release."""
    code = check_out(last_release(), has_native_kernels=False)  # messages do not depend on kernels
    model = make_asked(tmp_path_factory.mktemp("model") / "llama", "llama")
    stack = make_stack(tmp_path_factory.mktemp("stack"), model, 2, 2, router_flags=FLAGS)
    stack.add_router(SECOND_ROUTER)
    for name in OLD:
        stack.processes[name].code = code
    try:
        stack.start()
        oracle = ask_transformers(model, PROMPTS)  # meanwhile the stack starts
        stack.wait_ready()
        yield Served(stack, oracle)
    finally:
        stack.stop()


async def pairs_of(served: Served, target: str, salt: str) -> set[tuple[str, str]]:
    """Check that answers are exact, and return the pairs of prefill and decode worker that gave them."""
    names = {process.pid: name for name, process in served.stack.processes.items()}
    answers = await check_answers(target, served.oracle, cache_salt=salt)
    return {(names[each.timings.prefill_pid], names[each.timings.decode_pid]) for each in answers if each.timings}


@pytest.mark.parametrize("router", ["the last release's", "this tree's"])
async def test_pairs_of_both_releases_answer_exactly_below_either_router(served: Served, router: str) -> None:
    wanted = {("prefill-0", "decode-1"), ("prefill-1", "decode-0")}
    seen = set[tuple[str, str]]()
    for number in range(ROUNDS):
        seen |= await pairs_of(served, served.targets[router], f"{router} {number}")
        if seen >= wanted:
            break
    assert seen >= wanted


async def test_processes_are_rolled_to_this_release_under_load_and_no_request_fails(served: Served) -> None:
    stack, over = served.stack, asyncio.Event()
    targets = targets_of(stack)
    async with AsyncBatonClient(targets, timeout_s=30) as baton:
        expected = [await answer(baton, client) for client in range(CLIENTS)]
    asking = [asyncio.create_task(keep_asking(targets, client, expected[client], over)) for client in range(CLIENTS)]
    try:
        for name in ROLLED:
            assert await asyncio.to_thread(stack.processes[name].stop) == 0, f"{name} did not drain"
            stack.processes[name].code = None
            stack.processes[name].start()
            await asyncio.to_thread(stack.wait_ready)
    finally:
        over.set()
        answered = await asyncio.gather(*asking, return_exceptions=True)
    assert all(isinstance(count, int) and count > len(ROLLED) for count in answered), answered
    status = stack.status()  # from the router that was upgraded
    releases = {worker.worker_id: worker.release for worker in status.workers}
    before = last_release().version.replace(NAMELESS, "")
    assert releases == {"prefill-0": before, "prefill-1": RELEASE, "decode-0": RELEASE, "decode-1": RELEASE}
    assert status.release == RELEASE


async def test_worker_with_another_kv_layout_is_rejected_by_name_and_others_serve(served: Served) -> None:
    stack = served.stack
    command = list(stack.processes["prefill-1"].command)
    for flag, value in (("--worker-id", OTHER_LAYOUT), ("--port", str(free_ports(1)[0]))):
        command[command.index(flag) + 1] = value
    other = StackProcess(OTHER_LAYOUT, [*command, "--kv-cache-dtype", "int8"], stack.folder / f"{OTHER_LAYOUT}.log")
    stack.processes[OTHER_LAYOUT] = other
    other.start()

    def refusal() -> str:
        return next((each.refused for each in stack.status().workers if each.worker_id == OTHER_LAYOUT), "")

    await asyncio.to_thread(stack.wait_for, lambda: bool(refusal()), READY_S, "refusal")
    assert "KV layout" in refusal() and "dtype=int8" in refusal() and f"release {RELEASE}" in refusal()
    assert f"{OTHER_LAYOUT} is refused" in (stack.folder / "router.log").read_text()
    assert stack.status().ready
    prefills = {prefill for prefill, _ in await pairs_of(served, stack.target, "beside a refused one")}
    assert prefills <= {"prefill-0", "prefill-1"}


def test_last_release_is_an_older_one() -> None:
    assert last_release().version != RELEASE and check_out(last_release(), has_native_kernels=False).is_dir()
