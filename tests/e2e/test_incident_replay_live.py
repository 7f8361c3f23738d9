"""`baton bundle` and `baton replay` on a real stack under load: decisions and tokens are the same, other ones named."""

import asyncio
import json
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from baton.cli.__main__ import app
from baton.client import AsyncBatonClient, GenerateOptions
from baton.lab.replay import command
from baton.launch import CommandFailed
from tests.e2e.conftest import run
from tests.e2e.stack import Stack, make_stack

REQUESTS, TOKENS = 16, 20


def baton(*arguments: str) -> Result:
    """Run the command in this process, which has imported most of what it needs."""
    return CliRunner().invoke(app, arguments)


async def load(stack: Stack, without: Sequence[int] = ()) -> None:
    """Send requests that overlap; half of them share a prefix, and half are sampled."""
    async with AsyncBatonClient(stack.target, timeout_s=120) as client:

        async def one(index: int) -> None:
            await asyncio.sleep(0)
            prompt = [9] * 64 * (index % 2) + [11 + index] * (40 + 13 * index)
            options = GenerateOptions(max_tokens=TOKENS, ignore_eos=True, temperature=0.9 * (index % 4 > 1))
            await client.complete(prompt, **options, request_id=f"incident-{index}")

        for begin in range(0, REQUESTS, 4):
            await asyncio.gather(*(one(index) for index in range(begin, begin + 4) if index not in without))


def bundles(folder: Path, model: Path, flags: Sequence[tuple[str, ...]], without: Sequence[int] = ()) -> list[Path]:
    """Run the load; return a bundle made with each of these flags."""
    found = []
    with contextmanager(run)(make_stack(folder, model, router_flags=("--record-tokens-mib", "8"))) as stack:
        asyncio.run(load(stack, without))
        for number, each in enumerate(flags):
            found.append(folder / f"{number}.tar.gz")
            done = baton("bundle", "--out", str(found[-1]), "--admin", f"127.0.0.1:{stack.admin_port}", *each)
            assert done.exit_code == 0, done.output
    return found


@pytest.fixture(scope="module", autouse=True)
def predicted_once() -> Iterator[None]:
    """Each simulation is a process of several seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "predicted", cache(command.predicted))
        yield


@pytest.fixture
def unpredicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "predicted", lambda bundle, what_if: ())


@pytest.fixture(scope="module")
def both(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A bundle without and one with tokens."""
    return bundles(tmp_path_factory.mktemp("incident"), tiny_llama, [(), ("--with-tokens",)])


@pytest.fixture(scope="module")
def bundle(both: list[Path]) -> Path:
    return both[0]


@pytest.fixture(scope="module")
def exact(both: list[Path]) -> Path:
    return both[1]


def record(bundle: Path) -> dict[str, Any]:
    with tarfile.open(bundle) as archive:
        [name] = [each for each in archive.getnames() if each.endswith("/record.json")]
        file = archive.extractfile(name)
        assert file is not None
        found: dict[str, Any] = json.load(file)
        return found


def router_of(plain: dict[str, Any]) -> dict[str, Any]:
    router: dict[str, Any]
    [router] = [each for each in plain["processes"] if each["role"] == "router"]
    return router


def routed(plain: dict[str, Any], request_id: str) -> dict[str, Any]:
    [found] = [each for each in router_of(plain)["requests"] if each["request_id"] == request_id]
    decided: dict[str, Any] = found["decided"]
    return decided


def test_replay_of_a_loaded_stack_decides_as_recorded(bundle: Path) -> None:
    done = baton("replay", str(bundle), "--json")
    found = json.loads(done.stdout)
    assert done.exit_code == 0 and found["equal"], done.stdout
    assert found["placements"]["checked"] >= REQUESTS and not found["placements"]["differences"]
    by_worker = {each["worker"]: each for each in found["steps"]}
    assert by_worker["prefill-0"]["checked"] >= REQUESTS // 2, found["steps"]
    assert by_worker["decode-0"]["checked"] >= TOKENS, found["steps"]
    assert len(found["requests"]) >= REQUESTS and found["error"]["median"] < 10.0


@pytest.mark.usefixtures("unpredicted")
def test_replay_of_a_planted_decision_names_it(bundle: Path, tmp_path: Path) -> None:
    changed = record(bundle)
    routed(changed, "incident-5")["placements"][-1]["placement"]["decode"] = "elsewhere:1"
    file = tmp_path / "record.json"
    file.write_text(json.dumps(changed))
    done = baton("replay", str(file))
    assert done.exit_code == 1
    assert "first difference: request incident-5" in done.stdout
    assert "decode: recorded elsewhere:1, now 127.0.0.1:" in done.stdout


def test_replay_without_a_request_predicts_the_others(bundle: Path) -> None:
    done = baton("replay", str(bundle), "--without", "incident-15", "--add-prefill", "1", "--json")
    found = json.loads(done.stdout)
    assert found["change"] == "without incident-15 and with 1 more prefill worker"
    changed = {each["request_id"]: each["changed_ttft_ms"] for each in found["requests"]}
    assert changed.pop("incident-15") is None and all(changed.values())


def test_bundle_has_tokens_only_if_asked(bundle: Path, exact: Path) -> None:
    assert "tokens" not in routed(record(bundle), "incident-3") and '"digest"' not in json.dumps(record(bundle))
    tokens = routed(record(exact), "incident-3")["tokens"]
    assert tokens["prompt"] == [9] * 64 + [14] * 79 and len(tokens["answers"][0]) == TOKENS


@pytest.mark.usefixtures("unpredicted")
def test_replay_computes_the_recorded_tokens_and_digests(exact: Path, tiny_llama: Path) -> None:
    done = baton("replay", str(exact), "--model", str(tiny_llama), "--json")
    found = json.loads(done.stdout)
    assert done.exit_code == 0 and found["equal"], done.stdout
    by_worker = {each["worker"]: each for each in found["computed_steps"]}
    assert by_worker["prefill-0"]["checked"] >= REQUESTS // 2, found["computed_steps"]
    assert by_worker["decode-0"]["checked"] >= TOKENS and not by_worker["decode-0"]["stopped"]
    assert found["model_as_recorded"] is True


@pytest.mark.usefixtures("unpredicted")
def test_replay_of_a_planted_token_names_it(exact: Path, tiny_llama: Path, tmp_path: Path) -> None:
    changed = record(exact)
    answer = routed(changed, "incident-5")["tokens"]["answers"][0]
    answer[7] += 1
    file = tmp_path / "record.json"
    file.write_text(json.dumps(changed))
    done = baton("replay", str(file), "--model", str(tiny_llama))
    assert done.exit_code == 1
    assert f"request incident-5, token 7 of the answer: recorded {answer[7]}, computed {answer[7] - 1}" in done.stdout


def test_replay_without_a_request_is_compared_with_the_truth(bundle: Path, tiny_llama: Path, tmp_path: Path) -> None:
    [truth] = bundles(tmp_path, tiny_llama, [()], without=[15])
    done = baton("replay", str(bundle), "--without", "incident-15", "--truth", str(truth), "--json")
    found = json.loads(done.stdout)
    true = {each["request_id"]: each["true_ttft_ms"] for each in found["requests"]}
    assert true.pop("incident-15") is None and all(true.values()), done.stdout
    measured = {each["request_id"]: each["decided"]["ttft_ms"] for each in router_of(record(truth))["requests"]}
    assert true == {name: measured[name] for name in true}
    assert 0.0 < found["change_error"]["median"] < 10.0


def test_replay_with_a_truth_but_no_change_is_refused(bundle: Path) -> None:
    done = baton("replay", str(bundle), "--truth", str(bundle))
    assert isinstance(done.exception, CommandFailed) and "--truth: needs a change" in str(done.exception)
