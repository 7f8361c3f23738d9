"""BATON_* variables in the environment of `baton up`: each one applies or is refused."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

import baton.cli.up
from baton.cli.__main__ import app
from baton.cli.up import OWN_OPTIONS
from baton.cli.up_options import UpOptions
from baton.launch import CommandFailed
from baton.launch.process_plan import plan_processes
from baton.launch.processes import ProcessSpec
from baton.process.config import variable_of
from tests.fixtures.service_layout import TWO_GPUS, layout, plan

VARIANTS = (
    layout(),
    layout(prefill=0),
    layout(machine=TWO_GPUS, transport="gloo", tensor_parallel=2),
    layout(api_keys=Path("/keys"), insecure=True, tls_cert=Path("/cert"), tls_key=Path("/key")),
)
OPTIONS: Mapping[str, tuple[str, str, object]] = {
    "--adapter": ("sql=/a/sql, chat=/b c", "adapter", ["sql=/a/sql", " chat=/b c"]),
    "--admin-port": ("7001", "admin_port", 7001),
    "--block-size": ("16", "block_size", 16),
    "--device": ("cpu", "device", "cpu"),
    "--dtype": ("float32", "dtype", "float32"),
    "--host": ("::1", "host", "::1"),
    "--http-port": ("7002", "http_port", 7002),
    "--kv-cache-dtype": ("int8", "kv_cache_dtype", "int8"),
    "--kv-memory": ("1MiB", "kv_memory", 2**20),
    "--log-format": ("json", "log_format", "json"),
    "--kv-tier-memory": ("1MiB", "kv_tier_memory", 2**20),
    "--kv-tier-dir": ("/kv", "kv_tier_dir", Path("/kv")),
    "--kv-tier-size": ("1MiB", "kv_tier_size", 2**20),
    "--max-model-len": ("99", "max_model_len", 99),
    "--model": ("mine", "model", "mine"),
    "--model-name": ("mine", "model_name", "mine"),
    "--namespace": ("ours", "namespace", "ours"),
    "--placement": ("least_tokens", "placement", "least_tokens"),
    "--planner": ("act", "planner", "act"),
    "--port": ("7000", "port", 7000),
    "--quantize": ("int8", "quantize", "int8"),
    "--speculate": ("ngram", "speculate", "ngram"),
    "--swap-memory": ("1MiB", "swap_memory", 2**20),
    "--no-strict-tbt": ("true", "strict_tbt", True),
    "--tbt-slo-ms": ("70", "tbt_slo_ms", 70.0),
    "--ttft-slo-ms": ("700", "ttft_slo_ms", 700.0),
    "--tool-format": ("mistral", "tool_format", "mistral"),
    "--tensor-parallel": ("2", "tensor_parallel", 2),
    "--trace-file": ("t.jsonl", "trace_file", Path("t.jsonl")),
    "--transport": ("grpc", "transport", "grpc"),
}
"""What each is set to, and what `up` then has where."""
EXPOSURE = {"--api-keys", "--insecure", "--no-insecure", "--tls-cert", "--tls-key"}  # in tests of their own


def given_flags(spec: ProcessSpec) -> Iterator[str]:
    return (part for part in spec.command[spec.command.index("-m") + 2 :] if part.startswith("--"))


def passed_flags() -> list[str]:
    return sorted({flag for each in VARIANTS for spec in plan(each) for flag in given_flags(spec)})


def up(monkeypatch: pytest.MonkeyPatch, *arguments: str, **environment: str) -> UpOptions:
    calls: list[UpOptions] = []
    monkeypatch.setattr(baton.cli.up, "run_up", lambda options: calls.append(options) or 0)
    result = CliRunner().invoke(app, ["up", *arguments], env=environment)
    assert result.exit_code == 0, result.output
    return calls[0]


@pytest.mark.parametrize("flag", passed_flags())
def test_up_variable_of_passed_flag_applies_or_is_refused(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    field = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
    variable = variable_of(field)
    text, name, value = OPTIONS.get(flag, ("by hand", "", None))
    if name:
        options = up(monkeypatch, **{variable: text})
        assert getattr(options, name) == value
    elif flag in EXPOSURE:
        assert field in OWN_OPTIONS
    else:
        with pytest.raises(CommandFailed, match=variable):
            for each in VARIANTS:
                plan_processes(each, {variable: text}, OWN_OPTIONS)


def test_up_flag_wins_over_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert up(monkeypatch, "--placement", "round_robin", BATON_PLACEMENT="least_tokens").placement == "round_robin"
    assert up(monkeypatch, "--adapter", "a=/b", BATON_ADAPTER="c=/d").adapter == ["a=/b"]


def test_up_empty_variable_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    assert up(monkeypatch, BATON_PLACEMENT="").placement == "cache_aware"


def test_up_variable_that_agrees_is_accepted() -> None:
    assert plan_processes(layout(prefill=0), {"BATON_CORES": "0,1", "BATON_NICE": ""}, OWN_OPTIONS)


def test_up_variables_reach_their_processes() -> None:
    given = {"BATON_LOCAL_PREFILL_TOKENS": "0", "BATON_STEP_FILE": "steps", "BATON_TBT_SLO_MS": "70", "HOME": "/"}
    for spec in plan_processes(layout(), given, OWN_OPTIONS):
        kept = {name: value for name, value in spec.environment.items() if name in given}
        assert kept == {name: value for name, value in given.items() if name != "BATON_TBT_SLO_MS"}


def test_up_contradicting_variable_fails_before_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CORES", "0-63")
    options = up(monkeypatch, "--port", "0", "--admin-port", "0", "--http-port", "0")
    monkeypatch.undo()
    monkeypatch.setenv("BATON_CORES", "0-63")
    with pytest.raises(CommandFailed, match="BATON_CORES is '0-63', but `up` itself starts"):
        baton.cli.up.run_up(options)


def test_up_missing_draft_model_fails_before_start(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = ("--port", "0", "--admin-port", "0", "--http-port", "0")
    options = up(monkeypatch, *ports, "--speculate", "draft", "--draft-model", "./no-such-folder")
    monkeypatch.undo()
    with pytest.raises(CommandFailed, match=r"--draft-model \./no-such-folder: there is no such folder"):
        baton.cli.up.run_up(options)
