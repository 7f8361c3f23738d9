"""API keys and TLS on a real stack: cached prompts are not shared between keys, and no key is written anywhere."""

import os
import random
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.cli.keys import append_key, make_certificates
from baton.client import AsyncBatonClient, NotAllowed
from baton.process.security.api_keys import UNLIMITED, digest_of
from baton.process.security.tls import INTERNAL_NAME
from tests.e2e.conftest import REPOSITORY, run
from tests.e2e.stack import Stack, make_stack

WAIT_S = 30.0
PROMPT, BLOCK = 200, 32  # tokens


@dataclass
class Guarded:
    stack: Stack
    file: Path
    authority: Path
    keys: dict[str, str]

    def client(self, name: str) -> AsyncBatonClient:
        return AsyncBatonClient(self.stack.target, api_key=self.keys[name], tls=self.authority, timeout_s=WAIT_S)

    def add(self, name: str) -> None:
        self.keys[name] = append_key(self.file, name, UNLIMITED, is_admin=False)

    def reload(self) -> None:
        self.stack.processes["router"].signal(signal.SIGHUP)

    def looked_up_and_found(self) -> tuple[int, int]:
        """Return the prompt tokens that the prefill worker has looked up in its cache, and those that it found."""
        (load,) = (worker.load for worker in self.stack.status().workers if worker.role == "prefill")
        return (0, 0) if load is None else (load.cache_query_tokens, load.cache_hit_tokens)


@pytest.fixture(scope="module")
def guarded(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    make_certificates(folder / "tls", (), days=1)
    file = folder / "keys"
    keys = {name: append_key(file, name, UNLIMITED, is_admin=False) for name in ("alice", "bob")}
    flags = ["--api-keys", str(file), "--tls-cert", str(folder / "tls/server.pem")]
    flags += ["--tls-key", str(folder / "tls/server-key.pem")]
    internal = internal_flags(folder / "tls")
    flags += ["--local-prefill-tokens", "0", *internal]
    ways = {"decode-0": "tcp"}  # so that KV is sent over TLS too
    stack = make_stack(folder / "stack", tiny_llama, transports=ways, worker_flags=internal, router_flags=flags)
    stack.admin_key = append_key(file, "operator", UNLIMITED, is_admin=True)
    for process in stack.processes.values():
        process.is_forked = False  # a test reads the command lines
    for running in run(stack):
        yield Guarded(running, file, folder / "tls/ca.pem", keys)


def internal_flags(folder: Path) -> list[str]:
    names = (("ca", "internal-ca.pem"), ("cert", "internal.pem"), ("key", "internal-key.pem"))
    return [part for what, name in names for part in (f"--internal-tls-{what}", str(folder / name))]


async def ask(guarded: Guarded, name: str, prompt: list[int], salt: str = "") -> tuple[int, int, tuple[int, ...]]:
    """Return the cached tokens that the client is told, those that the prefill worker found, and the answer."""
    looked_up, before = guarded.looked_up_and_found()
    async with guarded.client(name) as client:
        completion = await client.complete(prompt, max_tokens=8, ignore_eos=True, cache_salt=salt)
    # A report that counts the lookup also counts what it found.
    guarded.stack.wait_for(
        lambda: guarded.looked_up_and_found()[0] >= looked_up + len(prompt), WAIT_S, "report of the lookup"
    )
    found = guarded.looked_up_and_found()[1] - before
    return completion.usage.cached_tokens, found, tuple(completion.choices[0].token_ids)


async def test_prompt_of_another_key_is_not_reported_as_cached_and_not_faster(guarded: Guarded) -> None:
    draw = random.Random(5)
    prompt = [draw.randrange(3, 500) for _ in range(PROMPT)]
    # Every prompt goes to the prefill worker, even if the decode worker has it cached (--local-prefill-tokens 0).
    first, again, others, others_again = [await ask(guarded, name, prompt) for name in ("alice", "alice", "bob", "bob")]
    whole_blocks = PROMPT // BLOCK * BLOCK
    assert first[:2] == others[:2] == (0, 0)
    assert again[0] == others_again[0] == whole_blocks
    assert again[1] == others_again[1] == whole_blocks
    assert (await ask(guarded, "alice", prompt, salt="mine"))[:2] == (0, 0)
    assert first[2] == again[2] == others[2] == others_again[2]


async def test_keys_are_added_and_removed_at_run_time(guarded: Guarded) -> None:
    guarded.add("carol")
    guarded.reload()

    def status_code() -> int:
        headers = {"authorization": f"Bearer {guarded.keys['carol']}"}
        with secure(guarded) as http:
            return http.get("/v1/models", headers=headers).status_code

    guarded.stack.wait_for(lambda: status_code() == 200, WAIT_S, "the new key taken in")
    async with guarded.client("carol") as client:
        assert await client.models()
        lines = guarded.file.read_text().splitlines(keepends=True)
        guarded.file.write_text("".join(line for line in lines if '"carol"' not in line))
        guarded.stack.wait_for(lambda: status_code() == 401, WAIT_S, "end of a key that was taken out of the file")
        with pytest.raises(NotAllowed):
            await client.complete([5, 6, 7])


def secure(guarded: Guarded) -> httpx2.Client:
    trusted = ssl.create_default_context(cafile=guarded.authority)
    url = guarded.stack.url.replace("http:", "https:")
    return httpx2.Client(base_url=url, verify=trusted, timeout=WAIT_S, trust_env=False)


def test_command_line_takes_key_and_authority_from_the_environment(guarded: Guarded) -> None:
    command = [sys.executable, "-m", "baton.cli", "generate", "--token-ids", "5,6", "--target", guarded.stack.target]
    for key, code in ((guarded.keys["bob"], 0), ("baton-wrong", 1)):
        environment = {**os.environ, "BATON_API_KEY": key, "BATON_TLS_CA": str(guarded.authority)}
        done = subprocess.run(
            [*command, "--max-tokens", "3"], capture_output=True, text=True, env=environment, cwd=REPOSITORY, timeout=60
        )
        assert done.returncode == code, done.stderr
        assert "wrong" not in done.stderr and (code == 0 or "BATON_API_KEY" in done.stderr)


async def test_no_key_nor_its_hash_is_in_a_log_a_trace_or_a_command_line(guarded: Guarded) -> None:
    with secure(guarded) as http:
        wrong = {"authorization": "Bearer baton-wrong"}
        assert http.post("/v1/completions", json={"prompt": [5], "max_tokens": 2}, headers=wrong).status_code == 401
        right = {"authorization": f"Bearer {guarded.keys['bob']}"}
        assert http.post("/v1/completions", json={"prompt": [5], "max_tokens": 2}, headers=right).status_code == 200
        assert http.post("/v1/completions", json={"prompt": "x" * 9000}, headers=right).status_code == 400
    stack = guarded.stack
    stack.wait_for(lambda: "text_completion" in stack.traces, WAIT_S, "trace")
    written = [process.text() for process in stack.processes.values()]
    written += [Path(f"/proc/{process.pid}/cmdline").read_text() for process in stack.processes.values()]
    written += [stack.traces]
    secrets = [*guarded.keys.values(), "baton-wrong"]
    for text in written:
        assert text and not any(secret in text or digest_of(secret).hex() in text for secret in secrets)


@pytest.mark.parametrize(
    ("ca", "certificate"),
    [("", ""), ("internal-ca", ""), ("ca", "server"), ("internal-ca", "server"), ("ca", "internal")],
)
async def test_workers_talk_to_none_but_their_own(guarded: Guarded, ca: str, certificate: str) -> None:
    folder = guarded.authority.parent
    command = guarded.stack.processes["prefill-0"].command
    target = f"127.0.0.1:{command[command.index('--port') + 1]}"

    def channel(ca: str, certificate: str) -> grpc.aio.Channel:
        if not ca:
            return grpc.aio.insecure_channel(target)
        names = (f"{certificate}-key.pem", f"{certificate}.pem") if certificate else ()
        own = [(folder / name).read_bytes() for name in names]
        credentials = grpc.ssl_channel_credentials((folder / f"{ca}.pem").read_bytes(), *own)
        # An attacker would not check the server's name.
        options = (("grpc.ssl_target_name_override", INTERNAL_NAME if ca == "internal-ca" else "localhost"),)
        return grpc.aio.secure_channel(target, credentials, options)

    async def health(ca: str, certificate: str) -> int:
        async with channel(ca, certificate) as opened:
            stub: Any = health_pb2_grpc.HealthStub(opened)
            return int((await stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)).status)

    assert await health("internal-ca", "internal") == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await health(ca, certificate)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def test_health_of_a_worker_needs_its_certificate(guarded: Guarded) -> None:
    command = guarded.stack.processes["decode-0"].command
    target = f"127.0.0.1:{command[command.index('--port') + 1]}"
    flags = internal_flags(guarded.authority.parent)
    variables = {
        f"BATON_{flag[2:].upper().replace('-', '_')}": value
        for flag, value in zip(flags[::2], flags[1::2], strict=True)
    }
    command = [sys.executable, "-m", "baton.cli", "health", "--internal", "--target", target]
    done = subprocess.run(command, capture_output=True, env={**os.environ, **variables}, cwd=REPOSITORY, timeout=60)
    assert done.returncode == 0, done.stderr


def test_kv_went_over_tls_between_the_workers(guarded: Guarded) -> None:
    guarded.stack.wait_for(lambda: '"tcp"' in guarded.stack.traces, WAIT_S, "transfer in the trace")
