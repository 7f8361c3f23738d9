"""A name of the configuration has one meaning, type, default and parser in all processes and in `baton up`."""

import inspect
from collections.abc import Iterator
from dataclasses import MISSING, fields
from itertools import pairwise
from types import NoneType
from typing import Any, get_args

import pytest
from click import Option
from typer.main import get_command

from baton.cli.__main__ import app
from baton.cli.up_options import UpOptions
from baton.decode_worker.config import DecodeConfig
from baton.elastic_worker.config import ElasticConfig
from baton.engine.kv_cache.layout import KV_DTYPE_ALIASES, KV_DTYPES
from baton.engine.weights.formats import WeightFormat
from baton.kvtransfer.description import TransportChoice
from baton.launch.process_plan import REDIS_GRACE_S, ROUTER_END_S, WORKER_END_S
from baton.launch.processes import Stage
from baton.prefill_worker.config import PrefillConfig
from baton.process.config import REQUIRED, ByteSize, ConfigError, FieldInfo, Settings, read_config
from baton.router.config import RouterConfig
from baton.text.output.formats.choose import FORMATS
from baton.worker.config import WorkerConfig
from tests.fixtures.service_layout import layout, plan

CONFIGS = (RouterConfig, PrefillConfig, DecodeConfig, ElasticConfig)
OWN_DEFAULTS = {"port", "model", "model_name"}
"""A router listens on a known port, and takes the model from its workers."""
FOUND_OUT = {"model", "model_name", "device", "adapter"}
"""Options of `up` of another type: it finds folders by names, and devices by their kind."""
REDIS = ("--redis-url", "redis://r")
WORKER = ("--worker-id", "w", "--model", "m")


def definitions() -> dict[str, list[FieldInfo]]:
    found: dict[str, list[FieldInfo]] = {}
    for config in CONFIGS:
        for name, info in config.fields.items():
            found.setdefault(name, []).append(info)
    return found


def kinds(annotation: Any) -> set[Any]:
    """The types of a union, without None."""
    parts = get_args(annotation) if type(None) in get_args(annotation) else (annotation,)
    return {part for part in parts if part is not NoneType}


@pytest.mark.parametrize("name", sorted(definitions()))
def test_field_of_several_configurations_has_one_meaning(name: str) -> None:
    first, *others = definitions()[name]
    for other in others:
        assert (kinds(other.annotation), other.description, other.variable) == (
            kinds(first.annotation),
            first.description,
            first.variable,
        )
        if name not in OWN_DEFAULTS:
            assert (other.default, other.bounds) == (first.default, first.bounds)


def test_no_two_fields_share_a_variable() -> None:
    by_variable: dict[str, set[str]] = {}
    for name, infos in definitions().items():
        by_variable.setdefault(infos[0].variable, set()).add(name)
    assert {variable: names for variable, names in by_variable.items() if len(names) > 1} == {}


def passed_on() -> Iterator[tuple[str, Option, FieldInfo]]:
    """Options of `up` that have the name of a field."""
    up: Any = get_command(app)
    options = {option.name: option for option in up.commands["up"].params}
    for each in fields(UpOptions):
        infos = definitions().get(each.name)
        if infos and each.name not in FOUND_OUT:
            yield each.name, options[each.name], infos[0]


def test_up_has_options_that_it_passes_on() -> None:
    assert len(list(passed_on())) > 20


@pytest.mark.parametrize(("name", "option", "info"), [pytest.param(*each, id=each[0]) for each in passed_on()])
def test_option_of_up_has_description_type_and_default_of_its_field(name: str, option: Option, info: FieldInfo) -> None:
    help_text = option.help or ""
    assert help_text.lower().startswith(info.description.lower())
    [default] = [each.default for each in fields(UpOptions) if each.name == name]
    assert default is not MISSING and (default is None or default == info.default)


@pytest.mark.parametrize("text", [".5GiB", "0.5 gib", "1.5GB", "4096", "64k", "-1GiB", "1XiB", "", "GiB"])
def test_amounts_of_memory_have_one_parser(text: str) -> None:
    from baton.cli.options import parse_bytes

    def outcome(read: Any) -> int | None:
        try:
            return int(read(text))
        except ValueError:
            return None

    assert outcome(parse_bytes) == outcome(ByteSize.read)
    if text == ".5GiB":
        assert parse_bytes(text) == 2**29


@pytest.mark.parametrize(("amount", "text"), [(2**29, "512MiB"), (0, "0"), (1000, "1000"), (3 * 2**30, "3GiB")])
def test_memory_sizes_are_shown_in_the_parsed_format(amount: int, text: str) -> None:
    assert (str(ByteSize(amount)), ByteSize.read(text)) == (text, amount)


@pytest.mark.parametrize(
    ("former", "name"),
    [("session_grace_s", "worker_reconnect_s"), ("planner_ttft_ms", "ttft_slo_ms"), ("planner_tbt_ms", "tbt_slo_ms")],
)
def test_former_name_of_a_routers_field_works_with_a_notice(
    former: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag, variable = f"--{former.replace('_', '-')}", f"BATON_{former.upper()}"
    given = read_config(RouterConfig, [*REDIS, flag, "7"])
    assert getattr(given, name) == 7 and flag in given.notices[0] and RouterConfig.fields[name].flag in given.notices[0]
    monkeypatch.setenv(variable, "8")
    by_variable = read_config(RouterConfig, REDIS)
    assert getattr(by_variable, name) == 8 and variable in by_variable.notices[0]
    monkeypatch.setenv(RouterConfig.fields[name].variable, "9")
    now = read_config(RouterConfig, REDIS)
    assert (getattr(now, name), now.notices) == (9, ())
    monkeypatch.setenv(variable, "none")
    monkeypatch.delenv(RouterConfig.fields[name].variable)
    with pytest.raises(ConfigError):
        read_config(RouterConfig, REDIS)


def test_session_grace_is_the_workers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_SESSION_GRACE_S", "20")
    worker = read_config(DecodeConfig, WORKER)
    assert (worker.session_grace_s, worker.notices) == (20, ())
    assert RouterConfig.fields["worker_reconnect_s"].default < DecodeConfig.fields["session_grace_s"].default


def test_up_kills_no_process_before_its_drain_has_ended() -> None:
    for spec in plan(layout(drain_s=120.0)):
        assert spec.grace_s == 120 + (ROUTER_END_S if spec.stage is Stage.ROUTER else WORKER_END_S)
    assert REDIS_GRACE_S > 0


def default_of(config: type[Settings], name: str) -> float:
    value = config.fields[name].default
    assert value is not REQUIRED
    return float(value)


def test_timeouts_that_follow_each_other_are_in_order() -> None:
    """Each one ends before the one that would take its failure for something else."""
    router, worker = RouterConfig, ElasticConfig
    for shorter, longer in pairwise(
        [
            default_of(worker, "report_period_s"),
            default_of(router, "session_silence_s"),
            default_of(worker, "lease_s"),
            default_of(worker, "session_grace_s"),
            default_of(worker, "stall_s"),
            default_of(worker, "role_drain_s"),
        ]
    ):
        assert shorter < longer
    assert default_of(router, "worker_reconnect_s") < default_of(worker, "session_grace_s")
    assert default_of(worker, "fetch_timeout_s") < default_of(worker, "lease_s")


def test_configuration_classes_are_all_checked() -> None:
    known = {base for config in CONFIGS for base in inspect.getmro(config)}

    def subclasses(of: type[Settings]) -> Iterator[type[Settings]]:
        for each in of.__subclasses__():
            yield each
            yield from subclasses(each)

    ours = {
        each for each in subclasses(Settings) if each.__module__.startswith("baton.") and ".cli." not in each.__module__
    }
    assert ours <= known


def test_choices_of_settings_equal_those_of_the_code() -> None:
    assert choices(WorkerConfig, "transport") == set(get_args(TransportChoice))
    assert choices(WorkerConfig, "kv_cache_dtype") == {"auto", *KV_DTYPES, *KV_DTYPE_ALIASES}
    assert choices(WorkerConfig, "quantize") - {"none"} <= set(WeightFormat)
    assert choices(RouterConfig, "tool_format") == {"auto", *FORMATS}


def choices(config: type[Settings], name: str) -> set[str]:
    return set(get_args(config.fields[name].annotation))
