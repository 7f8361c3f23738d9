"""A BATON_* variable in the environment of `baton up` holds, or is refused: none is ignored in silence."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import baton.cli.up
from baton.cli.__main__ import app
from baton.cli.commands.up import UpOptions
from baton.cli.up import OWN_OPTIONS, given_flags, refuse_overridden, variable_of
from baton.launch import CommandFailed
from baton.launch.process_plan import Exposure, UpSettings, plan_processes
from baton.launch.processes import ProcessSpec
from tests.cli.test_process_plan import SETTINGS, TWO_GPUS

VARIANTS = (
    SETTINGS,
    replace(SETTINGS, prefill=0, tbt_slo_ms=None),
    replace(SETTINGS, machine=TWO_GPUS, transport="gloo", tensor_parallel=2),
    replace(SETTINGS, exposure=Exposure(Path("/keys"), True, Path("/cert"), Path("/key"))),
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
    "--swap-memory": ("1MiB", "swap_memory", 2**20),
    "--tbt-slo-ms": ("70", "tbt_slo_ms", 70.0),
    "--tool-format": ("mistral", "tool_format", "mistral"),
    "--tensor-parallel": ("2", "tensor_parallel", 2),
    "--trace-file": ("t.jsonl", "trace_file", Path("t.jsonl")),
    "--transport": ("grpc", "transport", "grpc"),
}
"""What each is set to, and what `up` then has where."""
EXPOSURE = {"--api-keys", "--insecure", "--tls-cert", "--tls-key"}  # in tests of their own


def plan(settings: UpSettings) -> list[ProcessSpec]:
    return plan_processes(settings)


def passed_flags() -> list[str]:
    return sorted({flag for each in VARIANTS for spec in plan(each) for flag, _ in given_flags(spec)})


def up(monkeypatch: pytest.MonkeyPatch, *arguments: str, **environment: str) -> UpOptions:
    calls: list[UpOptions] = []
    monkeypatch.setattr(baton.cli.up, "run_up", lambda options: calls.append(options) or 0)
    result = CliRunner().invoke(app, ["up", *arguments], env=environment)
    assert result.exit_code == 0, result.output
    return calls[0]


@pytest.mark.parametrize("flag", passed_flags())
def test_every_flag_that_up_passes_holds_as_a_variable_or_is_refused(
    flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable, own_options = variable_of(flag), OWN_OPTIONS
    text, name, value = OPTIONS.get(flag, ("by hand", "", None))
    if name:
        options = up(monkeypatch, **{variable: text})
        assert getattr(options, name) == value
    elif flag in EXPOSURE:
        assert flag.removeprefix("--").replace("-", "_") in own_options
    else:
        with pytest.raises(CommandFailed, match=variable):
            for settings in VARIANTS:
                refuse_overridden(plan(settings), {variable: text}, own_options)


def test_a_flag_wins_over_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert up(monkeypatch, "--placement", "round_robin", BATON_PLACEMENT="least_tokens").placement == "round_robin"
    assert up(monkeypatch, "--adapter", "a=/b", BATON_ADAPTER="c=/d").adapter == ["a=/b"]


def test_a_variable_that_says_nothing_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert up(monkeypatch, BATON_PLACEMENT="").placement == "cache_aware"


def test_a_variable_that_says_what_up_says_is_no_contradiction() -> None:
    refuse_overridden(plan(SETTINGS), {"BATON_MODEL_NAME": SETTINGS.model_name, "BATON_CORES": ""}, ())


def test_a_variable_that_only_a_process_has_is_left_to_it() -> None:
    refuse_overridden(plan(SETTINGS), {"BATON_LOCAL_PREFILL_TOKENS": "0", "BATON_STEP_FILE": "steps"}, ())


def test_up_refuses_before_anything_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CORES", "0-63")
    options = up(monkeypatch, "--port", "0", "--admin-port", "0", "--http-port", "0")
    monkeypatch.undo()
    monkeypatch.setenv("BATON_CORES", "0-63")
    with pytest.raises(CommandFailed, match="BATON_CORES is '0-63', but `up` itself starts"):
        baton.cli.up.run_up(options)


def test_a_draft_model_that_is_not_there_is_named_before_anything_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = ("--port", "0", "--admin-port", "0", "--http-port", "0")
    options = up(monkeypatch, *ports, "--speculate", "draft", "--draft-model", "./no-such-folder")
    monkeypatch.undo()
    with pytest.raises(CommandFailed, match=r"the draft model: .*no-such-folder"):
        baton.cli.up.run_up(options)
