"""Errors that commands print when gRPC fails before the server can explain."""

import io
import json
import re
from collections.abc import Generator, Iterator
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest

import baton.cli.ask
from baton.cli import connection
from baton.cli.connection import explained, for_people
from baton.cli.keys import make_certificates
from baton.client import BatonClientError, Delta, ErrorDetails, Event, InvalidRequest, ServerError, Unavailable
from baton.launch import CommandFailed
from baton.process.registry.redis_server import free_port
from baton.process.security.tls import TlsFiles
from tests.fixtures.servers import threaded_server

RAW = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Connection refused"


def test_error_explained_by_server_is_not_changed() -> None:
    lost = Unavailable("a worker was lost", ErrorDetails(reason="WORKER_LOST"))
    for error in (lost, InvalidRequest("text: empty")):
        assert for_people(error, "host:1") is error


def test_unimplemented_method_names_the_other_port() -> None:
    error = for_people(ServerError("Method not found!", code=grpc.StatusCode.UNIMPLEMENTED), "host:1")
    assert error.code is grpc.StatusCode.UNIMPLEMENTED
    assert "host:1 does not serve this" in error.message and "--admin" in error.message


@pytest.mark.parametrize(("begun", "said"), [(False, "no answer from host:1"), (True, "lost the connection to host:1")])
def test_unavailable_distinguishes_absent_from_lost_server(begun: bool, said: str) -> None:
    def events() -> Generator[Event, None, None]:
        if begun:
            yield Delta(0, 0, (1,), "a")
        raise Unavailable(RAW)

    with pytest.raises(BatonClientError) as caught:
        list(explained(events(), "host:1"))
    assert isinstance(caught.value, Unavailable)
    assert caught.value.message == f"{said}; is `baton up` running?"


@pytest.mark.parametrize(
    ("raw", "advice"),
    [
        ("Trying to connect an http1.x server (HTTP status 400)", "HTTP port, .* gRPC port: --target host:7$"),
        ("Cannot check peer: missing selected ALPN property.", "HTTP port, .* --target host:7$"),
        ("SSL_ERROR_SSL: CERTIFICATE_VERIFY_FAILED: unable to get local issuer", "^the certificate of host:1 "),
        ("SSL_ERROR_SSL: WRONG_VERSION_NUMBER: OK", "^host:1 does not speak TLS; unset BATON_TLS_CA$"),
        ("ipv4:127.0.0.1:1: Socket closed", "if it speaks TLS, BATON_TLS_CA must name its certificate$"),
    ],
)
def test_unavailable_by_another_protocol_names_the_remedy(
    raw: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = SimpleNamespace(targets=("host:7",), http_targets=("host:1",))
    monkeypatch.setattr(connection, "running_services", lambda _: [record])
    error = for_people(Unavailable(f"failed to connect to all addresses; {raw}"), "host:1")
    assert re.search(advice, error.message), error.message


def test_http_port_of_an_unknown_service_names_the_default_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "running_services", lambda _: [])
    error = for_people(Unavailable("Trying to connect an http1.x server (HTTP status 400)"), "host:1")
    assert error.message.endswith(
        "HTTP port, and this command needs the gRPC port: `baton up` prints the endpoint, by default 127.0.0.1:50051"
    )


@pytest.fixture(params=["plain", "tls"])
def protocols(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Path | None, Path | None]]:
    """Yield the target of a gRPC server, its CA (None without TLS), and a wrong CA."""
    make_certificates(tmp_path / "tls", (), days=1)
    authority = tmp_path / "tls/ca.pem"
    files = TlsFiles(tmp_path / "tls/server.pem", tmp_path / "tls/server-key.pem")
    is_tls = request.param == "tls"
    with threaded_server(credentials=files.grpc_credentials() if is_tls else None) as port:
        trusted, wrong = (authority, authority.with_name("internal-ca.pem")) if is_tls else (None, authority)
        yield f"127.0.0.1:{port}", trusted, wrong


def test_tls_mismatch_names_the_remedy(
    protocols: tuple[str, Path | None, Path | None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target, trusted, wrong = protocols
    for authority, said in (
        (trusted, "does not serve this"),
        (wrong, "does not speak TLS" if trusted is None else "the certificate of"),
        *([(None, "if it speaks TLS")] if trusted is not None else []),
    ):
        monkeypatch.setenv("BATON_TLS_CA", str(authority or ""))
        assert baton.cli.ask.chat_once(target, "hi", None, {}, False) == 1
        assert said in capsys.readouterr().err


def test_missing_certificate_file_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BATON_TLS_CA", str(tmp_path / "none.pem"))
    with pytest.raises(CommandFailed, match=r"none\.pem is not a file"):
        baton.cli.ask.chat_once("127.0.0.1:1", "hi", None, {}, False)


@pytest.mark.parametrize("command", ["generate", "chat_once"])
@pytest.mark.parametrize("as_json", [False, True])
def test_question_without_server_names_the_target(
    command: str, as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    target = f"127.0.0.1:{free_port()}"
    assert getattr(baton.cli.ask, command)(target, "hi", None, {}, as_json) == 1
    said = f"no answer from {target}; is `baton up` running?"
    shown = capsys.readouterr()
    assert shown.err == f"baton: UNAVAILABLE: {said}\n"
    if as_json:
        assert json.loads(shown.out)["message"] == said


def test_conversation_without_server_continues(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = f"127.0.0.1:{free_port()}"
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    assert baton.cli.ask.chat_loop(target, None, {}) == 1
    assert f"no answer from {target}" in capsys.readouterr().err
