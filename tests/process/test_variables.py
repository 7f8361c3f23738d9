"""Misspelled BATON_* variables: a warning with the nearest name, or an error; links of Kubernetes are none."""

from dataclasses import fields
from typing import Any

import pytest
from click import Option
from typer.main import get_command
from typer.testing import CliRunner

from baton.cli.__main__ import app
from baton.cli.up_options import UpOptions
from baton.decode_worker.config import DecodeConfig
from baton.process.config import ConfigError, read_config, read_config_or_exit
from baton.router.config import RouterConfig
from baton.variables import known_variables, unknown_variables

REDIS = ("--redis-url", "redis://r")
LINKS = {
    "BATON_ROUTER_SERVICE_HOST": "10.0.0.1",
    "BATON_ROUTER_SERVICE_PORT": "50051",
    "BATON_ROUTER_SERVICE_PORT_GRPC": "50051",
    "BATON_ROUTER_PORT": "tcp://10.0.0.1:50051",
    "BATON_PORT_50051_TCP": "tcp://10.0.0.1:50051",
    "BATON_PORT_50051_TCP_ADDR": "10.0.0.1",
    "BATON_GRPC_PORT_50051_TCP_PROTO": "tcp",
}
FIRST = ["--port", "0", "--admin-port", "0", "--http-port", "0", "--model", "./no-such-folder"]


def test_unknown_variable_is_named_with_the_nearest_one() -> None:
    given = {"BATON_KV_MEMROY": "1GiB", "BATON_KV_MEMORY": "1GiB", "HOME": "/", "BATON_XYZZY": "1"}
    assert list(unknown_variables(given)) == [
        "no process knows the variable BATON_KV_MEMROY; did you mean BATON_KV_MEMORY?",
        "no process knows the variable BATON_XYZZY",
    ]


def test_kubernetes_service_links_are_no_unknown_variables() -> None:
    assert list(unknown_variables(LINKS)) == []
    assert len(list(unknown_variables({"BATON_HTPP_PORT": "8000"}))) == 1


def test_link_of_a_service_named_baton_is_not_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_PORT", "tcp://10.0.0.1:50051")
    assert read_config(RouterConfig, REDIS).port == 50051
    monkeypatch.setenv("BATON_PORT", "7000")
    assert read_config(RouterConfig, REDIS).port == 7000


def test_every_variable_of_options_and_fields_is_known() -> None:
    def options(command: Any) -> list[Option]:
        below = [option for each in getattr(command, "commands", {}).values() for option in options(each)]
        return [*command.params, *below]

    named = {name for option in options(get_command(app)) for name in _listed(getattr(option, "envvar", None))}
    own = {f"BATON_{each.name.upper()}" for each in fields(UpOptions)}
    assert {name for name in named | own if name.startswith("BATON_")} <= known_variables()
    assert {"BATON_SESSION_GRACE_S", "BATON_KV_MEMORY", "BATON_HTTP_PORT", "REDIS_URL"} <= known_variables()


def _listed(names: str | list[str] | None) -> list[str]:
    return [names] if isinstance(names, str) else list(names or ())


@pytest.mark.parametrize("config", [RouterConfig, DecodeConfig])
def test_process_warns_of_an_unknown_variable_and_refuses_it_when_strict(
    config: type[RouterConfig | DecodeConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*REDIS, *([] if config is RouterConfig else ["--worker-id", "w", "--model", "m"])]
    monkeypatch.setattr("sys.argv", ["x", *flags])
    monkeypatch.setenv("BATON_LOG_LEVLE", "debug")
    assert "BATON_LOG_LEVEL?" in read_config_or_exit(config, "x").notices[0]
    monkeypatch.setenv("BATON_STRICT_ENV", "1")
    with pytest.raises(SystemExit) as ended:
        read_config_or_exit(config, "x")
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "BATON_LOG_LEVLE" in said and "--strict-env" in said
    monkeypatch.setenv("BATON_RUN_ID", "a1")  # `up` has said it already
    assert read_config_or_exit(config, "x").notices == ()


def test_up_warns_of_an_unknown_variable_and_refuses_it_when_strict() -> None:
    given = {"BATON_KV_MEMROY": "1GiB"}
    warned = CliRunner().invoke(app, ["up", *FIRST], env=given)
    assert "did you mean BATON_KV_MEMORY?" in warned.output and "no such folder" in str(warned.exception)
    for strict in ({"BATON_STRICT_ENV": "1"}, {}):
        refused = CliRunner().invoke(app, ["up", *FIRST, *([] if strict else ["--strict-env"])], env=given | strict)
        assert isinstance(refused.exception, ConfigError) and "BATON_KV_MEMROY" in str(refused.exception)


def test_strict_environment_without_unknown_variables_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LINKS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["x", *REDIS, "--strict-env"])
    assert read_config_or_exit(RouterConfig, "x").notices == ()
    with pytest.raises(ConfigError):
        read_config(RouterConfig, [*REDIS, "--port", "tcp://10.0.0.1:1"])
