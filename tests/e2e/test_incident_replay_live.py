"""`baton bundle` and `baton replay` on a real stack under load: the same decisions, and a planted one is named."""

import asyncio
import json
import subprocess
import sys
import tarfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from baton.client import AsyncBatonClient
from tests.e2e.conftest import run
from tests.e2e.stack import Stack, make_stack

REQUESTS, TOKENS = 16, 20


def baton(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "baton.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


async def load(stack: Stack) -> None:
    """Send requests that overlap; half of them share a prefix."""
    async with AsyncBatonClient(stack.target, timeout_s=120) as client:

        async def one(index: int) -> None:
            await asyncio.sleep(0)
            prompt = [9] * 64 * (index % 2) + [11 + index] * (40 + 13 * index)
            await client.complete(prompt, max_tokens=TOKENS, ignore_eos=True, request_id=f"incident-{index}")

        for begin in range(0, REQUESTS, 4):
            await asyncio.gather(*(one(index) for index in range(begin, begin + 4)))


@pytest.fixture(scope="module")
def bundle(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("incident")
    out = folder / "bundle.tar.gz"
    with contextmanager(run)(make_stack(folder, tiny_llama)) as stack:
        asyncio.run(load(stack))
        done = baton("bundle", "--out", str(out), "--admin", f"127.0.0.1:{stack.admin_port}")
    assert done.returncode == 0, done.stderr
    return out


def record(bundle: Path) -> dict[str, Any]:
    with tarfile.open(bundle) as archive:
        [name] = [each for each in archive.getnames() if each.endswith("/record.json")]
        file = archive.extractfile(name)
        assert file is not None
        found: dict[str, Any] = json.load(file)
        return found


def test_replay_of_a_loaded_stack_decides_as_recorded(bundle: Path) -> None:
    done = baton("replay", str(bundle), "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["equal"], done.stdout
    assert found["placements"]["checked"] >= REQUESTS and not found["placements"]["differences"]
    by_worker = {each["worker"]: each for each in found["steps"]}
    assert by_worker["prefill-0"]["checked"] >= REQUESTS // 2, found["steps"]
    assert by_worker["decode-0"]["checked"] >= TOKENS, found["steps"]
    assert len(found["requests"]) >= REQUESTS and found["error"]["median"] < 10.0


def test_replay_of_a_planted_decision_names_it(bundle: Path, tmp_path: Path) -> None:
    changed = record(bundle)
    [router] = [each for each in changed["processes"] if each["role"] == "router"]
    [planted] = [each for each in router["requests"] if each["request_id"] == "incident-5"]
    planted["decided"]["placements"][-1]["placement"]["decode"] = "elsewhere:1"
    file = tmp_path / "record.json"
    file.write_text(json.dumps(changed))
    done = baton("replay", str(file))
    assert done.returncode == 1
    assert "first difference: request incident-5" in done.stdout
    assert "decode: recorded elsewhere:1, now 127.0.0.1:" in done.stdout


def test_replay_without_a_request_predicts_the_others(bundle: Path) -> None:
    done = baton("replay", str(bundle), "--without", "incident-15", "--add-prefill", "1", "--json")
    found = json.loads(done.stdout)
    assert found["change"] == "without incident-15 and with 1 more prefill worker"
    changed = {each["request_id"]: each["changed_ttft_ms"] for each in found["requests"]}
    assert changed.pop("incident-15") is None and all(changed.values())
