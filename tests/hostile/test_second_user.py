"""Another user of the machine gets nothing from a service that was started with `baton up --api-keys`."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from baton.cli.keys import append_key
from baton.client import AdminClient, BatonClient, NotAllowed
from baton.lab.chaos.watch import children_of
from baton.launch.paths import ROOT, RUNTIME
from baton.process.security.api_keys import UNLIMITED
from tests.e2e.stack import free_ports
from tests.fixtures.checkpoints import make_checkpoint
from tests.hostile.neighbours import environment_of

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")

NOBODY = 65534
READY_S, ATTACK_S, STOP_S = 120.0, 120.0, 30.0
PROMPT, TOKENS = [5, 6, 7, 8, 9], 200


@dataclass
class Service:
    process: "subprocess.Popen[bytes]"
    port: int
    admin_port: int
    log: Path
    keys: Path
    key: str
    cache: Path

    @property
    def pids(self) -> dict[int, dict[str, str]]:
        """The environment of each of its processes, by PID."""
        found = [self.process.pid, *children_of(self.process.pid)]
        return {pid: environment_of(pid) for pid in found}


def wait_for_ready(log: Path, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + READY_S
    while "ready in" not in log.read_text():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.05)  # a poll between two looks, bounded above


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    model = make_checkpoint(folder / "tiny-llama", "llama", seed=11)
    key = append_key(folder / "keys", "neighbour", UNLIMITED, is_admin=False)
    (port, admin_port, http_port), log = free_ports(3), folder / "up.log"
    ports = ("--port", str(port), "--admin-port", str(admin_port), "--http-port", str(http_port))
    flags = ("--model", str(model), "--kv-memory", "32MiB", "--device", "cpu", "--api-keys", str(folder / "keys"))
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "BATON_SESSION_SILENCE_S": "10"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "baton.cli", "up", *ports, *flags],
            stdout=output,
            stderr=output,
            cwd=ROOT,
            env=environment,
        )
    try:
        wait_for_ready(log, process)
        yield Service(process, port, admin_port, log, folder / "keys", key, folder / "cache")
    finally:
        process.terminate()
        process.wait(STOP_S)


def attack(service: Service) -> dict[str, list[list[str]]]:
    pids = service.pids
    redis_url = next(each["BATON_REDIS_URL"] for each in pids.values() if "BATON_REDIS_URL" in each)
    status_ports = [int(line.rpartition(":")[2]) for line in service.log.read_text().splitlines() if " serves " in line]
    owned = owned_ports(set(pids))
    known = {
        "uid": NOBODY,
        "redis": urlsplit(redis_url).port,
        "admin": service.admin_port,
        "public": service.port,
        "workers": status_ports,
        "owned": sorted(owned - {urlsplit(redis_url).port}),  # which waits for the end of a line
        "pids": sorted(pids),
        "paths": [
            str(RUNTIME),
            str(service.keys),
            str(service.cache / "baton"),
            str(RUNTIME / f"run-{service.port}.json"),
        ],
    }
    assert len(status_ports) == 2 and len(pids) >= 5
    script = [sys.executable, "-P", "-m", "tests.hostile.second_user"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        script, input=json.dumps(known).encode(), capture_output=True, timeout=ATTACK_S, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    result: dict[str, list[list[str]]] = json.loads(done.stdout)
    return result


def owned_ports(pids: set[int]) -> set[int]:
    """On which these processes listen."""
    inodes = set()
    for pid in pids:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = str(file.readlink())
            except FileNotFoundError:
                continue  # closed meanwhile
            inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in inodes}


def answer(service: Service) -> tuple[int, ...]:
    with BatonClient(f"127.0.0.1:{service.port}", api_key=service.key, timeout_s=60) as client:
        return tuple(client.complete(PROMPT, max_tokens=TOKENS, ignore_eos=True, seed=1).choices[0].token_ids)


def test_second_user_is_refused_everywhere_and_the_neighbours_answers_go_on(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answer(service)
    assert len(expected) == TOKENS
    with ThreadPoolExecutor(1) as pool:
        attacking = pool.submit(attack, service)
        answers = [answer(service)]
        while not attacking.done():
            answers.append(answer(service))
        result = attacking.result()
    assert set(answers) == {expected}

    found: dict[str, str] = dict(result["found"])
    allowed = {"UNAUTHENTICATED", "PERMISSION", "-NOAUTH", "-WRONGPASS", "UNKNOWN POOL", "ValueError", "error"}
    allowed |= {"ConnectionResetError"}
    assert {name: outcome for name, outcome in found.items() if outcome not in allowed} == {}
    assert {"redis KEYS *", "admin LoadAdapter", "admin Reload", "session Connect", "transfer Pair"} <= found.keys()
    assert "UNKNOWN POOL" in found.values(), "no port of KV was found"
    assert sum(name.startswith("environment of") for name in found) >= 5

    secrets = {
        value
        for environment in service.pids.values()
        for name, value in environment.items()
        if name in ("BATON_SECRET", "BATON_REDIS_URL") and value
    }
    secrets |= {str(urlsplit(each).password) for each in secrets if "://" in each} | {service.key}
    assert len(secrets) == 4
    texts = [*map(str, result["commands"]), service.log.read_text()]
    texts += [path.read_text() for path in RUNTIME.rglob(f"*{service.port}*") if path.is_file()]
    assert not [secret for secret in secrets for text in texts if secret in text]

    monkeypatch.setenv("XDG_CACHE_HOME", str(service.cache))
    with AdminClient(f"127.0.0.1:{service.admin_port}") as admin:
        assert len(admin.status().workers) == 2, "the first user needs no configuration"
    monkeypatch.setenv("XDG_CACHE_HOME", "/nonexistent")
    with AdminClient(f"127.0.0.1:{service.admin_port}") as admin, pytest.raises(NotAllowed):
        admin.status()
