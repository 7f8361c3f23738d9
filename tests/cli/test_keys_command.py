"""`baton keys`, `baton certs`, and how far `baton up` may reach."""

import stat
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cli.__main__ import app
from baton.cli.connection import credentials
from baton.cli.keys import FILES, append_key, make_certificates
from baton.launch import CommandFailed
from baton.process.objectives import RequestedObjectives
from baton.process.security.api_keys import UNLIMITED, KeyLimits, KeyRing, parse_key_file
from tests.fixtures.service_layout import layout, plan


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_keys_new_prints_key_and_stores_its_hash(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    done = CliRunner().invoke(
        app,
        ["keys", "new", "alice", "--file", str(file), "--concurrency", "3", "--max-context-tokens", "99", "--admin",
         "--ttft-slo-ms", "900"],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    secret = done.stdout.strip()
    assert secret.startswith("baton-") and secret not in file.read_text() and secret not in done.stderr
    key = KeyRing(parse_key_file(file.read_text())).find(secret)
    assert key is not None and (key.name, key.is_admin) == ("alice", True)
    assert key.limits == KeyLimits(concurrency=3, max_context_tokens=99)
    assert key.objectives == RequestedObjectives(ttft_slo_ms=900)
    assert mode(file) == 0o600


def test_append_key_keeps_lines_and_mode(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours")
    file.chmod(0o640)
    secrets = [append_key(file, name, UNLIMITED, is_admin=False) for name in ("a", "b")]
    assert file.read_text().startswith("# ours\n{")
    ring = KeyRing(parse_key_file(file.read_text()))
    assert [found.name for secret in secrets if (found := ring.find(secret))] == ["a", "b"]
    assert mode(file) == 0o640
    assert [path.name for path in tmp_path.iterdir()] == ["keys"]


def test_append_key_invalid_name_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    append_key(file, "a", UNLIMITED, is_admin=False)
    before = file.read_text()
    for name, told in (("a", "same name"), ("a b", "letters")):
        with pytest.raises(CommandFailed, match=told):
            append_key(file, name, UNLIMITED, is_admin=False)
    assert file.read_text() == before


def test_certificates_serve_their_purpose_only(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["gpu.example"], days=2)

    def verifies(authority: str, certificate: str, *more: str) -> bool:
        files = ["-CAfile", str(tmp_path / authority), *more, str(tmp_path / certificate)]
        return subprocess.run(["openssl", "verify", "-x509_strict", *files], capture_output=True).returncode == 0

    for host in ("localhost", "gpu.example"):
        assert verifies("ca.pem", "server.pem", "-purpose", "sslserver", "-verify_hostname", host)
    assert verifies("ca.pem", "server.pem", "-verify_ip", "127.0.0.1")
    assert not verifies("ca.pem", "server.pem", "-verify_hostname", "other.example")
    assert not verifies("ca.pem", "server.pem", "-purpose", "sslclient")
    assert verifies("internal-ca.pem", "internal.pem", "-purpose", "sslclient")
    assert not verifies("ca.pem", "internal.pem")
    assert not verifies("internal-ca.pem", "server.pem")
    assert {path.name for path in tmp_path.iterdir()} == set(FILES)  # no key of an authority
    assert all(mode(tmp_path / name) == (0o600 if "key" in name else 0o644) for name in FILES)


def test_certificates_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "internal.pem").write_text("ours")
    with pytest.raises(CommandFailed, match=r"internal\.pem exists"):
        make_certificates(tmp_path, [], days=1)
    assert [path.name for path in tmp_path.iterdir()] == ["internal.pem"]


def test_certificates_for_invalid_host_are_refused(tmp_path: Path) -> None:
    for host in ("a,DNS:b", "", "a b"):
        with pytest.raises(CommandFailed, match="neither a name nor an address"):
            make_certificates(tmp_path / "none", [host], days=1)


def test_credentials_come_from_environment_and_are_not_in_repr(monkeypatch: pytest.MonkeyPatch) -> None:
    from baton.client.channel import Security

    monkeypatch.setenv("BATON_API_KEY", "baton-SECRET")
    monkeypatch.delenv("BATON_TLS_CA", raising=False)
    assert credentials() == {"api_key": "baton-SECRET", "tls": False}
    assert "SECRET" not in repr(Security(**credentials()))


def test_command_has_no_flag_for_api_key() -> None:
    for command in ("generate", "chat", "up", "batch"):
        output = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
        assert "--api-key " not in output


def test_up_beyond_loopback_needs_keys_or_insecure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("BATON_API_KEY_HASHES", raising=False)
    reached: list[object] = []

    def stop(*arguments: object) -> None:
        reached.append(arguments)
        raise CommandFailed("far enough")

    monkeypatch.setattr("baton.cli.up.find_model", stop)
    runner = CliRunner()
    refused = runner.invoke(app, ["up", "--host", "0.0.0.0"])
    assert isinstance(refused.exception, CommandFailed) and "--insecure" in str(refused.exception)
    assert not reached
    (tmp_path / "keys").write_text("")
    for flags in (["--insecure"], ["--api-keys", str(tmp_path / "keys")]):
        runner.invoke(app, ["up", "--host", "0.0.0.0", *flags])
    assert len(reached) == 2


def test_process_plan_passes_keys_and_certificates_to_router() -> None:
    given = layout(api_keys=Path("keys"), insecure=True, tls_cert=Path("c"), tls_key=Path("k"))
    command = " ".join(plan(given)[0].command)
    assert "--api-keys keys --insecure --tls-cert c --tls-key k" in command
