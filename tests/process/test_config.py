"""Flags, variables and defaults, and that errors name what is wrong."""

import re
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Literal

import pytest

from baton.process.config import (
    ByteSize,
    ConfigError,
    Cores,
    Field,
    ListenConfig,
    LogConfig,
    RegistryConfig,
    TelemetryConfig,
    Workers,
    read_config,
)
from baton.worker.config import WorkerConfig


def test_config_reads_redis_url_if_its_own_variable_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://elsewhere:6379/0")
    assert read_config(RegistryConfig, ()).redis_url == "redis://elsewhere:6379/0"
    monkeypatch.setenv("BATON_REDIS_URL", "redis://here:6379/0")
    assert read_config(RegistryConfig, ()).redis_url == "redis://here:6379/0"


class ExampleConfig(ListenConfig, RegistryConfig, LogConfig, TelemetryConfig):
    """An example."""

    model: Path = Field(description="folder of the checkpoint")
    kv_memory: ByteSize = Field(ByteSize(1024), description="100 % of it")
    cores: Cores | None = None
    workers: Workers = ()
    transport: Literal["auto", "grpc"] = "auto"
    eager: bool = False


def test_flag_wins_over_a_variable_and_a_variable_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_PORT", "1")
    monkeypatch.setenv("BATON_HOST", "0.0.0.0")
    config = read_config(ExampleConfig, ["--model", "m", "--port", "2"])
    assert (config.port, config.host, config.namespace) == (2, "0.0.0.0", "default")


def test_values_are_read_by_their_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CORES", "0,2-3")
    monkeypatch.setenv("BATON_WORKERS", "prefill@h:1,decode@h:2")
    config = read_config(ExampleConfig, ["--model", "m", "--kv-memory", "512MiB", "--eager"])
    assert config.cores == frozenset({0, 2, 3})
    assert [worker.endpoint for worker in config.workers] == ["h:1", "h:2"]
    assert (config.kv_memory, config.eager, config.model) == (512 * 2**20, True, Path("m"))


def test_collector_has_its_standard_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4317")
    assert read_config(ExampleConfig, ["--model", "m"]).otlp_endpoint == "http://collector:4317"
    assert read_config(ExampleConfig, ["--model", "m", "--otlp-endpoint", "x:1"]).otlp_endpoint == "x:1"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], r"--model \(BATON_MODEL\): Field required"),
        (["--model", "m", "--port", "70000"], r"--port \(BATON_PORT\)"),
        (["--model", "m", "--cores", "x"], r"--cores \(BATON_CORES\).*'x'"),
        (["--model", "m", "--kv-memory", "lots"], r"--kv-memory \(BATON_KV_MEMORY\)"),
        (["--model", "m", "--transport", "pigeon"], r"--transport \(BATON_TRANSPORT\).*'auto' or 'grpc'"),
        (["--model", "m", "--workers", "cook@h:1"], r"--workers \(BATON_WORKERS\).*cook"),
        (["--model", "m", "--prot", "1"], "--prot"),
        (["--model"], "--model"),
    ],
)
def test_error_names_the_flag_and_the_variable(arguments: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_config(ExampleConfig, arguments)


def test_wrong_variable_is_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_LOG_FORMAT", "xml")
    with pytest.raises(ConfigError, match="BATON_LOG_FORMAT"):
        read_config(ExampleConfig, ["--model", "m"])


def test_config_is_frozen() -> None:
    config = read_config(ExampleConfig, ["--model", "m"])
    with pytest.raises(FrozenInstanceError, match="frozen"):
        config.port = 3


def test_help_groups_flags_by_the_class_that_declares_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_config(WorkerConfig, ["--help"], program="example")
    text = capsys.readouterr().out
    listen = text.partition("\nlisten:\n")[2].partition("\n\n")[0]
    assert set(re.findall(r"^  (--[\w-]+)", listen, re.MULTILINE)) == {"--host", "--port"}
    assert {f"\n{title}:\n" in text for title in ("registry", "internal tls", "telemetry", "worker")} == {True}


def test_help_shows_every_flag_with_its_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        read_config(ExampleConfig, ["--help"], program="example")
    assert left.value.code == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "--model MODEL folder of the checkpoint (required; BATON_MODEL)" in printed
    assert "100 % of it" in printed
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in printed


@pytest.mark.parametrize("text", ["1" * 400 + "GiB", "9" * 5000, "١GiB", "1e3", "0x10", "1_000", "-1", "nan"])
def test_invalid_byte_size_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="is not an amount of memory"):
        ByteSize.read(text)
