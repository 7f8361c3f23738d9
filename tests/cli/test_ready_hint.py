"""What `baton up` prints when it is ready: commands that work when they are pasted."""

import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from baton import IMPORT_PATH
from baton.cli.keys import make_certificates
from baton.cli.options import DEFAULT_TARGET, admin_target_of
from baton.cli.up import ready_lines, script_command
from baton.launch.ports import RouterPorts
from baton.launch.process_plan import ServiceLayout
from baton.process.security.tls import TlsFiles
from tests.client.conftest import Events, FakeBaton
from tests.fixtures.servers import threaded_server
from tests.fixtures.service_layout import layout


def hints(settings: ServiceLayout, default_target: str = DEFAULT_TARGET, chats: bool = True) -> list[str]:
    """The two commands."""
    *_, question, status = ready_lines(settings, "./baton", default_target, chats)
    return [question.removeprefix("  try").strip(), status.strip()]


def test_ready_hint_on_default_port_names_no_target() -> None:
    assert hints(layout()) == ["./baton chat 'What is a block table?'", "./baton status"]
    assert "generate" in hints(layout(), chats=False)[0]


def test_admin_target_of_ipv6_needs_brackets() -> None:
    assert admin_target_of("[fd00::1]:50051,router:7") == "[fd00::1]:50052,router:8"
    with pytest.raises(typer.BadParameter, match="in brackets"):
        admin_target_of("fd00::1:50051")


def test_ready_hint_on_other_port_names_target() -> None:
    ports = (RouterPorts(7000, 7001, 8000),)
    moved = layout(ports=ports, host="0.0.0.0")
    assert all(hint.endswith(" --target 127.0.0.1:7000") for hint in hints(moved))
    elsewhere = layout(ports=(RouterPorts(7000, 9, 8000),), host="0.0.0.0")
    assert hints(elsewhere)[1] == "./baton status --admin 127.0.0.1:9"
    assert hints(layout(ports=ports, host="::"))[0].endswith(" --target 127.0.0.1:7000")


def test_ready_hint_overrides_target_variable() -> None:
    assert hints(layout(), default_target="other:1")[0].endswith(f" --target {DEFAULT_TARGET}")
    assert "--target" not in hints(layout(ports=(RouterPorts(7000, 7001, 8000),)), default_target="127.0.0.1:7000")[0]


def test_ready_lines_of_several_routers_list_own_ports_of_each() -> None:
    two = layout(ports=(RouterPorts(50051, 50052, 8000, 8001), RouterPorts(50051, 50053, 8000, 8002)))
    lines = ready_lines(two, "./baton", DEFAULT_TARGET, True)
    assert "  gRPC      127.0.0.1:50051   (baton.v1.BatonService)" in lines
    assert "  admin     127.0.0.1:50052, 127.0.0.1:50053   (2 routers)" in lines
    assert "  metrics   127.0.0.1:8001, 127.0.0.1:8002" in lines


def test_script_command_of_a_clone_is_shortest(tmp_path: Path) -> None:
    for clone in (tmp_path, tmp_path / "a b"):
        clone.mkdir(exist_ok=True)
        (clone / "pyproject.toml").touch()
    assert script_command(tmp_path, tmp_path, tmp_path) == "./baton"
    assert script_command(tmp_path / "a b", tmp_path, tmp_path) == shlex.quote(f"{tmp_path}/a b/baton")


def test_script_command_of_a_wheel_is_the_installed_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "baton").touch(0o755)
    assert script_command(tmp_path / "site-packages" / "baton", tmp_path, programs) == str(programs / "baton")
    monkeypatch.setenv("PATH", str(programs))
    assert script_command(tmp_path / "site-packages" / "baton", tmp_path, programs) == "baton"


@pytest.fixture
def certificate(tmp_path: Path) -> TlsFiles:
    make_certificates(tmp_path / "t l s", (), days=1)
    folder = tmp_path / "t l s"
    return TlsFiles(folder / "server.pem", folder / "server-key.pem")


@pytest.fixture
def port(certificate: TlsFiles) -> Iterator[int]:
    """Port of a service with that certificate."""
    events = Events()
    fake = FakeBaton([lambda *_: iter([events.started(), events.delta(0, [5], "hello"), events.finished()])])
    with threaded_server(fake.register, credentials=certificate.grpc_credentials()) as bound:
        yield bound


def test_ready_hint_with_tls_works_when_pasted(certificate: TlsFiles, port: int, tmp_path: Path) -> None:
    command = f"{shlex.quote(sys.executable)} -P -m baton.cli"
    settings = layout(ports=(RouterPorts(port, port + 1, 8000),), tls_cert=certificate.certificate)
    *_, question, _ = ready_lines(settings, command, DEFAULT_TARGET, True)
    pasted = question.removeprefix("  try")
    environment = {"PYTHONPATH": str(IMPORT_PATH), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(pasted, shell=True, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello\n", "")


def test_ready_hint_with_keys_names_key_variable() -> None:
    guarded = layout(api_keys=Path("keys"), tls_cert=Path("cert"))
    assert hints(guarded)[0].startswith("BATON_API_KEY=... BATON_TLS_CA=")
