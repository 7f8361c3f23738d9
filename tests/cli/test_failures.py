"""What people read where gRPC speaks instead of our server."""

import io
import json
from collections.abc import Generator

import grpc
import pytest

import cli.ask
from cli.failures import explained, for_people
from client import BatonClientError, Delta, ErrorDetails, Event, InvalidRequest, ServerError, Unavailable
from service.redis_server import free_port

RAW = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Connection refused"


def test_what_the_server_explains_stays_as_it_is() -> None:
    lost = Unavailable("a worker was lost", ErrorDetails(reason="WORKER_LOST"))
    for error in (lost, InvalidRequest("text: empty")):
        assert for_people(error, "host:1") is error


def test_a_method_that_is_not_there_points_at_the_other_port() -> None:
    error = for_people(ServerError("Method not found!", code=grpc.StatusCode.UNIMPLEMENTED), "host:1")
    assert error.code is grpc.StatusCode.UNIMPLEMENTED
    assert "host:1 does not serve this" in error.message and "--admin" in error.message


@pytest.mark.parametrize(("begun", "said"), [(False, "no answer from host:1"), (True, "lost the connection to host:1")])
def test_a_server_that_is_not_there_is_told_from_one_that_went_away(begun: bool, said: str) -> None:
    def events() -> Generator[Event, None, None]:
        if begun:
            yield Delta(0, 0, (1,), "a")
        raise Unavailable(RAW)

    with pytest.raises(BatonClientError) as caught:
        list(explained(events(), "host:1"))
    assert isinstance(caught.value, Unavailable)
    assert caught.value.message == f"{said}; is `baton up` running?"


@pytest.mark.parametrize("command", ["generate", "chat_once"])
@pytest.mark.parametrize("as_json", [False, True])
def test_asking_nobody_says_who_did_not_answer(command: str, as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    target = f"127.0.0.1:{free_port()}"
    assert getattr(cli.ask, command)(target, "hi", None, {}, as_json) == 1
    said = f"no answer from {target}; is `baton up` running?"
    shown = capsys.readouterr()
    assert shown.err == f"baton: UNAVAILABLE: {said}\n"
    if as_json:
        assert json.loads(shown.out)["message"] == said


def test_a_conversation_with_nobody_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = f"127.0.0.1:{free_port()}"
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    assert cli.ask.chat_loop(target, None, {}) == 0
    assert f"no answer from {target}" in capsys.readouterr().err
