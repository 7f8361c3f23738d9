"""Stacks that several tests share, and the order of tests for parallel runs."""

from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.e2e.faulty import make_faulty_stack, second_of
from tests.e2e.stack import Stack, make_stack
from tests.fixtures.checkpoints import make_checkpoint
from tests.fixtures.preloaded import TRANSFORMERS, preload

REPOSITORY = Path(__file__).parents[2]
SHARED = pytest.StashKey[ExitStack]()
SHARED_STACKS = {"_faulty_stack": "faulty", "tiny_stack": "tiny"}
LONGEST = ("faulty", "up", "tiny", "test_chaos_live")
"""Groups that start first: a long one at the end would keep one process busy while the other is idle."""
ALONE_TOGETHER = ("test_up", "test_colocated", "test_bench_isolation", "test_planner_live")
"""Files that run one after another: `baton up` chooses its ports before it binds them, so two runs could collide."""
WITH_TRANSFORMERS = ("test_colocated", "test_encoders_live", "test_token_exact", "test_windows_live")
"""Files whose workers run a model with the code of transformers."""


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group the tests for xdist by shared stack or file, so that each stack is started once."""
    groups = {item: group_of(item) for item in items}
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: LONGEST.index(groups[item]) if groups[item] in LONGEST else len(LONGEST))


def pytest_collection_finish(session: pytest.Session) -> None:
    if any(item.path.stem in WITH_TRANSFORMERS for item in session.items):
        preload(*TRANSFORMERS)


def pytest_sessionstart(session: pytest.Session) -> None:
    session.stash[SHARED] = ExitStack()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Stop a shared stack after the last test of its group; otherwise it would take CPU time until the end."""
    try:
        return (yield)
    finally:
        if nextitem is None or group_of(nextitem) != group_of(item):
            item.session.stash[SHARED].close()


def group_of(item: pytest.Item) -> str:
    names = getattr(item, "fixturenames", ())
    shared = [group for fixture, group in SHARED_STACKS.items() if fixture in names]
    return shared[0] if shared else "up" if item.path.stem in ALONE_TOGETHER else item.path.stem


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny-llama", "llama", seed=11)


@pytest.fixture(scope="session")
def tiny_stack(request: pytest.FixtureRequest, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Stack:
    """1P+1D on a tiny random Llama in fp32."""
    return shared(request, make_stack(tmp_path_factory.mktemp("stack"), tiny_llama))


@pytest.fixture
def stack(tiny_stack: Stack) -> Iterator[Stack]:
    """Shared 1P+1D stack; after the test, all KV pages must be free again."""
    yield tiny_stack
    tiny_stack.wait_idle()


@pytest.fixture(scope="session")
def _faulty_stack(request: pytest.FixtureRequest, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Stack:
    return shared(request, make_faulty_stack(tmp_path_factory.mktemp("faulty"), tiny_llama))


@pytest.fixture
def faulty(_faulty_stack: Stack) -> Iterator[Stack]:
    """Shared stack for faults, see `make_faulty_stack`; processes that an earlier test killed are started again."""
    stack = _faulty_stack
    stack.start([name for name, process in stack.processes.items() if not process.runs])
    stack.wait_ready()
    second_of(stack).wait_ready()
    yield stack
    stack.wait_idle()


def shared(request: pytest.FixtureRequest, stack: Stack) -> Stack:
    return request.session.stash[SHARED].enter_context(contextmanager(run)(stack))


def run(stack: Stack, workers: int | None = None) -> Iterator[Stack]:
    """Run a stack. `workers`: number to wait for, if it is not that of the stack's own workers."""
    try:
        stack.start()
        stack.wait_ready(workers)
        yield stack
    finally:
        stack.stop()
