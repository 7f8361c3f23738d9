"""The Node example, which knows nothing of Baton but protos/baton.proto, against the fake service."""

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.cli.keys import make_certificates
from baton.process.security.tls import TlsFiles
from tests.client.conftest import Answer, Events, FakeBaton
from tests.fixtures.servers import threaded_server
from tests.fixtures.tools import tool

RUN_TIMEOUT_S = 120

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def command(node_client: list[str], baton: FakeBaton) -> list[str]:
    return [*node_client, "--target", baton.target]


@pytest.fixture
def run(command: list[str]) -> Run:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=RUN_TIMEOUT_S)

    return run


def test_text_streams_to_the_terminal(run: Run, baton: FakeBaton) -> None:
    done = run("--max-tokens", "3", "--temperature", "0.5", "--seed", str(2**64 - 1), "hi")
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello\n", "")
    sampling = baton.requests[0].sampling
    assert baton.requests[0].text == "hi"
    assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (3, 0.5, 2**64 - 1)
    assert not sampling.HasField("top_p")


def test_chat_sends_a_message_of_the_user(run: Run, baton: FakeBaton) -> None:
    done = run("--chat", "--max-tokens", "3", "hi")
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello\n", "")
    (request,) = baton.requests
    assert [(message.role, message.content) for message in request.messages] == [("user", "hi")]
    assert request.sampling.max_tokens == 3


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_is_the_usage(run: Run, flag: str) -> None:
    done = run(flag)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: ") and "--max-tokens" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [(["--nonsense", "x"], "--nonsense"), ([], "one prompt"), (["a", "b"], "one prompt"), (["x", "--seed"], "--seed")],
)
def test_misuse_is_said_with_the_usage(run: Run, arguments: list[str], complaint: str) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    said, _, usage = done.stderr.partition("\n")
    assert complaint in said and usage.startswith("usage: ")


def test_variable_is_the_default_of_the_target(
    node_client: list[str], baton: FakeBaton, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_TARGET", baton.target)
    done = subprocess.run([*node_client, "hi"], capture_output=True, text=True, timeout=RUN_TIMEOUT_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello\n", "")


def test_json_has_one_object_per_event(run: Run) -> None:
    events = [json.loads(line) for line in run("--json", "hi").stdout.splitlines()]
    assert [event["event"] for event in events] == ["started", "delta", "delta", "finished"]
    assert events[0]["seed"] == str(2**63 + 1)
    assert events[2] == {"event": "delta", "index": 0, "offset": 1, "token_ids": [6, 7], "text": "llo"}
    assert events[3]["finish_reason"] == "length"
    assert events[3]["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "cached_tokens": 0}
    assert events[3]["timings"]["transfer_bytes"] == "4096"


def test_refusal_is_printed_with_its_code(run: Run, baton: FakeBaton, aborting: Any) -> None:
    baton.answers = [aborting(grpc.StatusCode.INVALID_ARGUMENT, "text: empty")]
    done = run("")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "INVALID_ARGUMENT: text: empty\n")


def test_gap_in_the_answer_is_noticed(run: Run, baton: FakeBaton, events: Events) -> None:
    baton.answers = [lambda request, context: iter([events.started(), events.delta(1, [6], "llo"), events.finished()])]
    done = run("hi")
    assert done.returncode == 1
    assert "expected offset 0, got 1" in done.stderr


def test_broken_stream_resumes_at_the_next_router(
    node_client: list[str], baton: FakeBaton, other: FakeBaton, breaks: Answer, rest: Answer, aborting: Any
) -> None:
    baton.answers = [breaks]
    other.resumed = [aborting(grpc.StatusCode.NOT_FOUND, "no such stream"), rest]
    command = [*node_client, "--target", f"{baton.target},{other.target}", "--max-tokens", "3", "hi"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "héllö\n", "")
    (received,) = other.requests[-1].choices
    assert (received.index, list(received.token_ids), received.text_bytes) == (0, [5], 3)
    request = other.requests[-1].generate
    assert (request.text, request.sampling.max_tokens, request.sampling.seed) == ("hi", 3, 2**63 + 1)


@pytest.fixture
def tls(baton: FakeBaton, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The same service on a port with TLS, and the authority of its certificate."""
    make_certificates(tmp_path / "tls", (), days=1)
    credentials = TlsFiles(tmp_path / "tls/server.pem", tmp_path / "tls/server-key.pem").grpc_credentials()
    with threaded_server(baton.register, credentials=credentials) as port:
        yield f"localhost:{port}", tmp_path / "tls/ca.pem"


def test_key_of_the_environment_goes_with_the_call_over_tls(
    node_client: list[str], baton: FakeBaton, tls: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, authority = tls
    monkeypatch.setenv("BATON_API_KEY", "baton-secret")
    command = [*node_client, "--target", target, "--ca", str(authority), "hi"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello\n", "")
    assert baton.metadata[0]["authorization"] == "Bearer baton-secret"


def test_authority_that_did_not_sign_the_certificate_is_not_enough(
    node_client: list[str], baton: FakeBaton, tls: tuple[str, Path]
) -> None:
    target, authority = tls
    command = [*node_client, "--target", target, "--timeout-s", "5", "hi", "--ca"]
    done = subprocess.run(
        [*command, str(authority.with_name("internal-ca.pem"))], capture_output=True, text=True, timeout=RUN_TIMEOUT_S
    )
    assert done.returncode == 1
    assert done.stderr.startswith(("UNAVAILABLE", "DEADLINE_EXCEEDED"))
    assert baton.requests == []


def test_ctrl_c_cancels_the_call(command: list[str], baton: FakeBaton, events: Events) -> None:
    def endless(request: Any, context: grpc.ServicerContext) -> Any:
        yield events.started()
        baton.ended.wait(timeout=RUN_TIMEOUT_S)

    baton.answers = [endless]
    with running([*command, "--json", "hi"]) as process:
        assert process.stdout is not None and '"started"' in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert baton.ended.wait(timeout=RUN_TIMEOUT_S)
        assert process.wait(timeout=RUN_TIMEOUT_S) == 1


@contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_missing_tool_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(pytest.fail.Exception, match="apt install nodejs npm"):
        tool("node")
