"""The tutorial's demonstration cannot seem to succeed where nothing was killed."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from baton.process.registry.redis_server import free_port
from tests.fixtures.tools import ROOT, load_script


@pytest.fixture
def example() -> ModuleType:
    return load_script(ROOT / "examples" / "kill_decode_worker.py")


class IdleAdmin:
    """A service whose workers write no answer."""

    def status(self) -> Any:
        return type("Status", (), {"workers": ()})


def test_kill_example_fails_where_no_worker_writes(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "WAIT_S", 0.05)
    with pytest.raises(SystemExit, match="no decode worker wrote an answer"):
        example.kill_a_writer(IdleAdmin())


def test_kill_example_says_in_one_line_that_no_service_answers(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(example, "RUNTIME", tmp_path)
    monkeypatch.setattr(example, "DEFAULT_TARGET", f"127.0.0.1:{free_port()}")
    with pytest.raises(SystemExit, match=r"no service answers at 127.0.0.1:\d+ .*start one with ./baton up"):
        example.main()
