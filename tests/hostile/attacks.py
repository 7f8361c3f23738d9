"""Attacks on a running service, each for a given time: `python -m tests.hostile.attacks NAME SERVICE`.

An attack runs in its own process, so that it slows other clients down only through the service. SERVICE is a `Target`
as JSON.
"""

import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx2
import redis

from baton.client import AdminClient, BatonClientError
from baton.launch.paths import ROOT
from baton.process.security.cluster_secret import ClusterSecret
from baton.protos import sampling_pb2, session_pb2, session_pb2_grpc

FAMILY = "👨‍👩‍👧‍👦‍"
CONNECT = "/baton.v1.SessionService/Connect"
WAIT_S = 30.0
PAUSE_S = 0.05
FLOOR = "floor"
FLOOD = b"a" * 65536


@dataclass(frozen=True, slots=True)
class Target:
    """Ports of the service on 127.0.0.1, and secrets that only an insider knows."""

    port: int
    http_port: int
    admin_port: int
    workers: tuple[int, ...]
    secret: str
    redis_url: str
    seconds: float

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"


def flood_trailers(target: Target) -> None:
    """Send endless trailers after a chunked body."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    for connection in connections(target):
        with suppress(OSError):  # the server ends the connection
            connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n")
            while True:
                connection.sendall(b"Xn: " + FLOOD + b"\r\n")


def smuggle_a_request(target: Target) -> None:
    """Send a body that looks like a request, after a header for an upgrade that the server does not do."""
    body = b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"
    for connection in connections(target):
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body))
        time.sleep(0.02)  # the body comes in a segment of its own
        connection.sendall(body)
        answer = connection.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1 ") == 1, answer


def load_adapters(target: Target) -> None:
    """Load adapter folders with malformed files."""
    with tempfile.TemporaryDirectory() as name, AdminClient(f"127.0.0.1:{target.admin_port}") as admin:
        while left(target):
            for number, config in enumerate(ADAPTER_CONFIGS):
                folder = Path(name) / str(number)
                folder.mkdir(exist_ok=True)
                (folder / "adapter_config.json").write_text(config)
                (folder / "adapter_model.safetensors").write_bytes(b"\0" * 64)
                refused(lambda folder=folder: admin.load_adapter("hostile", str(folder)))


ADAPTER_CONFIGS = (
    '{"peft_type": "LORA", "r": 4, "lora_alpha": 1' + "0" * 400 + ', "target_modules": ["q_proj"]}',
    "[" * 200_000,
    '{"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["\\ud800"]}',
    '{"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"], "rank_pattern": {"(?i)q_proj": 4}}',
    '{"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": "' + "(" * 500 + "q" + ")" * 500 + '"}',
    '{"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": "(a+)+$"}',
)


def start_absurd_answers(target: Target) -> None:
    """Send a worker a start command with numbers far beyond any limit."""
    sampling = sampling_pb2.Sampling(n=2**32 - 1, max_tokens=4)
    send_commands(target, session_pb2.Start(attempt_id=1, token_ids=[5, 6, 7], sampling=sampling))


def start_absurd_choices(target: Target) -> None:
    sampling = sampling_pb2.Sampling(n=1, max_tokens=4)
    start = session_pb2.Start(attempt_id=1, token_ids=[5, 6, 7], sampling=sampling, first_choice=2**32 - 1)
    send_commands(target, start)


def list_absurd_adapters(target: Target) -> None:
    send_commands(target, session_pb2.AdapterList(version=2**63))


def send_commands(target: Target, command: Any) -> None:
    """Send a command to each worker in new sessions, every PAUSE_S, like a defective router with the cluster secret."""
    field = next(
        each.name for each in session_pb2.ConnectRequest.DESCRIPTOR.fields if each.message_type == command.DESCRIPTOR
    )
    hello = session_pb2.Hello(router_id=b"x" * 16)
    requests = [session_pb2.ConnectRequest(hello=hello), session_pb2.ConnectRequest(**{field: command})]
    while left(target):
        for port in target.workers:
            proof = ClusterSecret(target.secret).call_proof(CONNECT, port)
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, suppress(grpc.RpcError):
                stub = session_pb2_grpc.SessionServiceStub(channel)
                for _ in stub.Connect(iter(requests), metadata=proof.metadata, timeout=1.0):
                    pass
            time.sleep(PAUSE_S)


def loop_in_templates(target: Target) -> None:
    """Send chats whose template loops endlessly (LOOP in neighbours.py)."""
    ask(target, "/v1/chat/completions", {"messages": [{"role": "user", "content": "for ever"}]})


def join_emoji(target: Target) -> None:
    ask(target, "/v1/completions", {"prompt": FAMILY * (1_000_000 // len(FAMILY.encode()))})


def post_from_other_sites(target: Target) -> None:
    """Send what a browser would send for a page of another site, also with a rebound DNS name."""
    with httpx2.Client(base_url=target.url, trust_env=False, timeout=WAIT_S) as client:
        while left(target):
            body = json.dumps({"prompt": "a", "max_tokens": 64})
            other = {"content-type": "text/plain", "origin": "http://evil.example", "sec-fetch-site": "cross-site"}
            assert client.post("/v1/completions", content=body, headers=other).status_code in (403, 415)
            for path in ("/page/state", "/metrics", "/v1/models"):
                assert client.get(path, headers={"host": "evil.example"}).status_code == 403


def ask_for_forms(target: Target) -> None:
    """Send JSON schemas that are all different."""
    person = {"type": "object", "additionalProperties": False, "required": ["name", "age"]}
    for number in range(10**9):
        fields = {"name": {"type": "string"}, "age": {"type": "integer"}, f"x{number}": {"type": "string"}}
        schema = {"name": "person", "schema": {**person, "properties": fields}}
        form = {"type": "json_schema", "json_schema": schema}
        body = {"messages": [{"role": "user", "content": "Who?"}], "response_format": form, "max_tokens": 2}
        if not left(target):
            return
        with httpx2.Client(base_url=target.url, trust_env=False, timeout=WAIT_S) as client:
            answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text


def start_it_twice(target: Target) -> None:
    ports = ("--port", target.port, "--http-port", target.http_port, "--admin-port", target.admin_port)
    while left(target):
        command = [sys.executable, "-P", "-m", "baton.cli", "up", *map(str, ports)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=WAIT_S)
        assert done.returncode != 0 and b"ready in" not in done.stdout


def fill_redis(target: Target) -> None:
    with redis.Redis.from_url(target.redis_url) as client:
        client.config_set("maxmemory", 1)
        try:
            while left(target):
                time.sleep(0.1)
        finally:
            client.config_set("maxmemory", 0)


def say_nothing(target: Target) -> None:
    """Open 300 idle connections at a time."""
    while left(target):
        with suppress(OSError):
            idle = [socket.create_connection(("127.0.0.1", target.http_port), WAIT_S) for _ in range(300)]
            time.sleep(0.5)
            for each in idle:
                each.close()


def multiply(target: Target) -> None:
    """Use CPU time without contacting the service: the baseline for the effect of any process on the machine."""
    while left(target):
        sum(number * number for number in range(10_000))


ATTACKS: Mapping[str, Callable[[Target], None]] = {
    "S1": flood_trailers,
    "S2": smuggle_a_request,
    "S3": load_adapters,
    "S5": start_absurd_answers,
    "S6": start_absurd_choices,
    "S7": list_absurd_adapters,
    "S10": loop_in_templates,
    "S11": join_emoji,
    "S12": post_from_other_sites,
    "N1": ask_for_forms,
    "N2": start_it_twice,
    "O1": fill_redis,
    "O2": say_nothing,
    FLOOR: multiply,
}


def ask(target: Target, path: str, body: Mapping[str, Any]) -> None:
    """Send requests, four at a time; each must be refused."""
    from concurrent.futures import ThreadPoolExecutor

    def once(_: int) -> int:
        with httpx2.Client(base_url=target.url, trust_env=False, timeout=WAIT_S) as client:
            return client.post(path, json={"max_tokens": 2, **body}).status_code

    with ThreadPoolExecutor(4) as pool:
        while left(target):
            assert {400, 429, 503} >= set(pool.map(once, range(4)))


def connections(target: Target) -> Iterator[socket.socket]:
    while left(target):
        with socket.create_connection(("127.0.0.1", target.http_port), WAIT_S) as connection:
            connection.settimeout(WAIT_S)
            yield connection


def refused(call: Callable[[], object]) -> None:
    try:
        call()
    except BatonClientError:
        return
    raise AssertionError("a malformed adapter was loaded")


_BEGAN_S = time.monotonic()


def left(target: Target) -> bool:
    return time.monotonic() - _BEGAN_S < target.seconds


if __name__ == "__main__":
    given = json.loads(sys.argv[2])
    ATTACKS[sys.argv[1]](Target(**{**given, "workers": tuple(given["workers"])}))
