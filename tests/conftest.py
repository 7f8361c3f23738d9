"""Fixtures that more than one folder of tests uses."""

import gc
import os
import socket
import subprocess
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from baton.process.registry import redis_server
from tests.fixtures.tools import ROOT, installed_node_example, tool

if find_spec("hypothesis") is not None:  # a machine for GPUs may have none
    from hypothesis import HealthCheck, settings

    # How long an example takes says only how busy the machine is.
    settings.register_profile("baton", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("baton")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests stay to the end: looking through them once would take a twentieth of the collection's time, and
    again and again much of the run's."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is tested as a whole comes first: it takes long, and at the end would leave the other processes idle."""
    items.sort(key=lambda item: item.path.parent != ROOT / "tests")


@pytest.fixture(scope="session", autouse=True)
def processes_find_tests() -> Iterator[None]:
    """Modules of tests/fixtures run in processes that the code under test starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT}")
        yield


@pytest.fixture(scope="session", autouse=True)
def own_ports() -> Iterator[None]:
    """Give each of up to four xdist processes ports of its own, so that none binds one that another found free."""
    place = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redis_server, "PORTS", redis_server.PORTS[place % 4 :: 4])
        yield


@pytest.fixture
def listening() -> Iterator[int]:
    """Port of 127.0.0.1 on which a socket listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


@pytest.fixture(scope="module")
def module_redis() -> Iterator[redis_server.RedisServer]:
    server = redis_server.start_redis_server()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def native_kernels() -> None:
    """Fails what asks for it where those of this processor are not built."""
    from baton.kernels.native.library import native_library  # a machine for the router alone has no torch

    if native_library() is None:
        pytest.fail(
            "the native kernels are not built: `python -m baton.kernels.native.build`; on Debian: apt install g++"
        )


@pytest.fixture(scope="session")
def node_client() -> list[str]:
    """The Node example as a command; `--target` is still to be added."""
    script: Path = installed_node_example()
    return [tool("node"), str(script), "--proto", str(ROOT / "protos" / "baton.proto")]


@pytest.fixture(scope="module")
def forked_ranks() -> Iterator[None]:
    """Further ranks begin where their imports are done. As they are served they start in tests/e2e."""
    from baton.engine.parallel import other_ranks
    from tests.fixtures.preloaded import ForkedRank

    forking = SimpleNamespace(Popen=ForkedRank, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(other_ranks, "subprocess", forking)
        yield
