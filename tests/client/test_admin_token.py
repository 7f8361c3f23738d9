"""A client of the admin port shows the token of a service that this user has started here, whenever that starts."""

from pathlib import Path

import pytest

from baton.client.channel import AdminSecurity, admin_token_file


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "baton").mkdir()
    return tmp_path


def test_admin_client_finds_the_token_of_a_service_that_starts_later() -> None:
    security = AdminSecurity(target="127.0.0.1:50052")
    assert security.metadata() == ()
    admin_token_file(50052).write_text("token\n")
    assert security.metadata() == (("authorization", "Bearer token"),)
    assert AdminSecurity(target="localhost:50052").metadata() == security.metadata()
    admin_token_file(50052).write_text("of the next run\n")
    assert security.metadata() == (("authorization", "Bearer of the next run"),)


@pytest.mark.parametrize("target", ["127.0.0.1:50054", "10.0.0.7:50052", "dns:///baton", "", "127.0.0.1:x"])
def test_admin_client_shows_a_token_to_no_other_port_or_machine(target: str) -> None:
    admin_token_file(50052).write_text("token\n")
    assert AdminSecurity(target=target).metadata() == ()


def test_given_admin_key_is_shown_instead() -> None:
    admin_token_file(50052).write_text("token\n")
    assert AdminSecurity("baton-key", target="127.0.0.1:50052").metadata() == (("authorization", "Bearer baton-key"),)
