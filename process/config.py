"""Configuration of a process: one frozen object. Only this module reads flags and BATON_* variables.

    class RouterConfig(ListenConfig, RegistryConfig, LogConfig):
        port: int = Field(50051, ge=0, le=65535, description="public port")

    config = read_config_or_exit(RouterConfig, program=".venv/bin/python -m baton.router")

Field `kv_memory` is set by the flag `--kv-memory` or the variable `BATON_KV_MEMORY`; the flag wins. The field's type
parses the text. Uses only the standard library, because workers also run on machines without pydantic.
"""

import copy
import enum
import inspect
import logging
import os
import re
import sys
from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction, _ArgumentGroup
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import FrozenInstanceError, dataclass, field, replace
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NoReturn, Self, TypeVar, get_args, get_origin

from baton.process.affinity import parse_cores
from baton.process.objectives import LEAST_SLO_MS, MOST_SLO_MS, LatencyObjectives
from baton.process.registry.redis_url import REDIS_PORT, check_redis_url
from baton.process.registry.worker_record import AdapterFolder, WorkerRecord, parse_adapters, parse_workers
from baton.process.security.cluster_secret import ClusterSecret
from baton.process.serving.addresses import Address, address_of_url, check_distinct
from baton.process.telemetry.collector import Collector, Protocol, choose_collector
from baton.variables import is_service_link, unknown_variables

if TYPE_CHECKING:
    from baton.process.security.tls import InternalTls

logger = logging.getLogger(__name__)
_REQUIRED: Any = object()
_TRUE, _FALSE = {"1", "true", "yes", "on", "y", "t"}, {"0", "false", "no", "off", "n", "f"}
_BYTES = re.compile(r"\s*([0-9]{0,18}\.?[0-9]{1,18})\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_NUMBERS = {int: "an integer", float: "a number"}
_BOUNDS: dict[str, tuple[str, Callable[[Any, float], bool]]] = {
    "gt": ("greater than", lambda value, bound: value > bound),
    "ge": ("greater than or equal to", lambda value, bound: value >= bound),
    "lt": ("less than", lambda value, bound: value < bound),
    "le": ("less than or equal to", lambda value, bound: value <= bound),
}
_CHECK = "_checks_several_fields"
_FORMER = "former "  # prefix of the parsed attribute of a flag's former name


class ConfigError(Exception):
    """Error: a flag or variable is missing, unknown or wrong; the message names it."""


class ByteSize(int):
    """Amount of memory, written `512MiB`, `1.5GB` or `4096`."""

    def __str__(self) -> str:
        """Return the text that `read` parses, such as `512MiB`."""
        power = next(power for power in (4, 3, 2, 1, 0) if self % 1024**power == 0)
        return f"{self // 1024**power}{' KMGT'[power].strip()}{'iB' if power else ''}" if self else "0"

    @classmethod
    def read(cls, text: str) -> "ByteSize":
        """Parse an amount of memory. Raises: ValueError."""
        found = _BYTES.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is not an amount of memory such as 512MiB or 1.5GiB")
        return cls(int(float(found[1]) * (1024 if found[3] else 1000) ** _POWERS[found[2].lower()]))


@dataclass(frozen=True, slots=True)
class Reader:
    """Parser of a field type that `_read` cannot parse. For a repeatable flag, `parse` gets a list of texts."""

    parse: Callable[[Any], Any]
    repeatable: bool = False


Cores = Annotated[frozenset[int], Reader(parse_cores)]
"""CPU cores, written `0,2-3`."""
Workers = Annotated[tuple[WorkerRecord, ...], Reader(parse_workers)]
"""Fixed workers, written `prefill@host:port,decode@host:port`."""
Adapters = Annotated[tuple[AdapterFolder, ...], Reader(parse_adapters, repeatable=True)]
"""Adapters, written `NAME=FOLDER`: one flag each, or comma-separated in the variable."""


def _flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    return f"BATON_{name.upper()}"


def flags_for(values: Mapping[str, Any]) -> list[str]:
    """Return the command-line flags that set these fields; a field with the value None gets no flag."""
    flags: list[str] = []
    for name, value in values.items():
        if isinstance(value, bool):
            flags.append(_flag_of(name if value else f"no_{name}"))
        elif value is not None:
            each_value = value if isinstance(value, tuple | list) else (value,)
            flags += [part for each in each_value for part in (_flag_of(name), str(each))]
    return flags


@dataclass(frozen=True, slots=True)
class FieldInfo:
    name: str = ""
    annotation: Any = None
    default: Any = _REQUIRED
    description: str = ""
    given_variable: str | None = None
    alias: str | None = None
    has_flag: bool = True
    former: str | None = None
    pattern: str | None = None
    bounds: Mapping[str, float] = field(default_factory=dict)  # values of the bounds gt, ge, lt and le

    @property
    def flag(self) -> str:
        return _flag_of(self.name)

    @property
    def variable(self) -> str:
        return self.given_variable or variable_of(self.name)

    @property
    def former_flag(self) -> str | None:
        return None if self.former is None else _flag_of(self.former)

    @property
    def former_variable(self) -> str | None:
        return None if self.former is None else variable_of(self.former)

    @property
    def help(self) -> str:
        default = "required" if self.default is _REQUIRED else f"default: {self.default_text}"
        names = " or ".join(filter(None, (self.variable, self.alias)))
        return f"{self.description} ({default}; {names})".replace("%", "%%").lstrip()

    @property
    def default_text(self) -> str:
        return "none" if self.default in (None, ()) else str(self.default)

    @property
    def metavar(self) -> str:
        if get_origin(self.annotation) is Literal:
            return "|".join(map(str, get_args(self.annotation)))
        if inspect.isclass(self.annotation) and issubclass(self.annotation, enum.Enum):
            return "|".join(each.value for each in self.annotation)
        return self.name.rpartition("_")[2].upper()

    @property
    def is_repeatable(self) -> bool:
        return any(isinstance(mark, Reader) and mark.repeatable for mark in get_args(self.annotation))

    def read(self, given: Any) -> Any:
        """Return the checked value of the field. A text or a list of texts is parsed first. Raises: ValueError."""
        return self.check(_read(self.annotation, given) if isinstance(given, str | list) else given)

    def check(self, value: Any) -> Any:
        """Check that the value is within the field's bounds; return it. Raises: ValueError."""
        if self.pattern is not None and isinstance(value, str) and re.search(self.pattern, value) is None:
            raise ValueError(f"String should match pattern '{self.pattern}'")
        for name, bound in self.bounds.items():
            words, holds = _BOUNDS[name]
            if isinstance(value, int | float) and not holds(value, bound):
                raise ValueError(f"Input should be {words} {bound:g}")
        return value


def Field(
    default: Any = _REQUIRED,
    *,
    description: str = "",
    variable: str | None = None,
    alias: str | None = None,
    has_flag: bool = True,
    former: str | None = None,
    pattern: str | None = None,
    **bounds: float,
) -> Any:
    """Declare a field of a configuration.

    `variable`: name of the environment variable; None: BATON_ and the field's name. `alias`: another variable, read if
    `variable` is not set. `has_flag`: False for secrets, because other users can read arguments. `former`: the field's
    name in the last release; its flag and variable still work, with a warning. `bounds`: gt, ge, lt, le.
    """
    return FieldInfo("", None, default, description, variable, alias, has_flag, former, pattern, bounds)


def field_of(config: "type[Settings]", name: str, **changes: Any) -> Any:
    """Return a copy of another configuration's field. `changes`: changed attributes, such as the default."""
    return replace(config.fields[name], **changes)


REQUIRED = _REQUIRED
Method = TypeVar("Method", bound=Callable[[Any], None])


def check(method: Method) -> Method:
    """Mark a method that checks several fields together and raises ValueError if they contradict each other."""
    setattr(method, _CHECK, True)
    return method


class Settings:
    """Base of all configurations. Instances are immutable. A field that is not passed gets the value of its
    environment variable, or else its default.
    """

    fields: ClassVar[dict[str, FieldInfo]] = {}
    _own_fields: ClassVar[dict[str, FieldInfo]] = {}

    def __init_subclass__(cls) -> None:
        cls._own_fields = {}
        for name, annotation in inspect.get_annotations(cls).items():
            given = vars(cls).get(name, _REQUIRED)
            info = given if isinstance(given, FieldInfo) else FieldInfo(default=given)
            cls._own_fields[name] = replace(info, name=name, annotation=annotation)
            if name in vars(cls):
                delattr(cls, name)
        cls.fields = {}
        for base in reversed(cls.__mro__):
            cls.fields |= vars(base).get("_own_fields", {})

    def __init__(self, **given: Any) -> None:
        """Read all fields. Raises: ConfigError, which names every wrong field."""
        problems = []
        self.notices: tuple[str, ...]
        """Warnings about flags and variables of the last release, to be logged once."""
        vars(self)["notices"] = ()
        for name, info in self.fields.items():
            value = self._value_of(info, given)
            try:
                if value is _REQUIRED and info.default is _REQUIRED:
                    raise ValueError("Field required")
                vars(self)[name] = info.default if value is _REQUIRED else info.read(value)
            except ValueError as error:
                problems.append(f"{info.flag} ({info.variable}): {error}")
        problems += [f"{name}: Extra inputs are not permitted" for name in given]
        if problems:
            raise ConfigError("; ".join(problems))
        for method in (each for base in reversed(type(self).__mro__) for each in vars(base).values()):
            if hasattr(method, _CHECK):
                try:
                    method(self)
                except ValueError as error:
                    raise ConfigError(f"configuration: Value error, {error}") from error

    def _value_of(self, info: FieldInfo, given: dict[str, Any]) -> Any:
        """Remove the field from `given`. Return its value from a flag or variable, also of its former name."""
        flag, former_flag = given.pop(info.name, _REQUIRED), given.pop(_FORMER + info.name, _REQUIRED)
        variable, former = map(_set_variable, (info.variable, info.former_variable))
        found = {
            info.flag: flag,
            info.former_flag: former_flag,
            info.variable: variable or os.environ.get(info.alias or "") or _REQUIRED,
            info.former_variable: former or _REQUIRED,
        }
        name, value = next(((name, each) for name, each in found.items() if each is not _REQUIRED), (None, _REQUIRED))
        if info.former is not None and name in (info.former_flag, info.former_variable):
            new = info.flag if name == info.former_flag else info.variable
            vars(self)["notices"] += (f"{name} is called {new} here, and stops working with the next release",)
        return value

    @property
    def connects_to(self) -> tuple[Address, ...]:
        """Return the addresses of other servers that this configuration names."""
        return ()

    def but(self, **changes: Any) -> Self:
        """Return a copy with changed values, which are not checked."""
        changed = copy.copy(self)
        vars(changed).update(changes)
        return changed

    def __setattr__(self, name: str, value: Any) -> None:
        raise FrozenInstanceError(f"cannot assign to {name}: a configuration is frozen")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash(tuple(vars(self).items()))


def _set_variable(name: str | None) -> str | None:
    value = os.environ.get(name or "")
    return value if name and value and not is_service_link(name, value) else None


def _read(wanted: Any, text: Any) -> Any:
    """Parse the text of a field of type `wanted`. Raises: ValueError."""
    origin, choices = get_origin(wanted), get_args(wanted)
    if origin is Annotated:
        return _parsed(next(mark for mark in choices if isinstance(mark, Reader)), text)
    if origin is Literal:
        return _one_of(choices, text)
    if origin is not None:  # a union
        return _first_of([choice for choice in choices if choice is not NoneType], text)
    if wanted is bool:
        if text.lower() not in _TRUE | _FALSE:
            raise ValueError("Input should be a valid boolean, unable to interpret input")
        return text.lower() in _TRUE
    if wanted is ByteSize:
        return ByteSize.read(text)
    if issubclass(wanted, enum.Enum):
        return wanted(_one_of([each.value for each in wanted], text))
    try:
        return wanted(text)  # text, path or number
    except ValueError as error:
        name = _NUMBERS[wanted]
        valid = f"a valid {name.partition(' ')[2]}"
        raise ValueError(f"Input should be {valid}, unable to parse string as {name}") from error


def _parsed(reader: Reader, text: Any) -> Any:
    try:
        return reader.parse(text)
    except ValueError as error:
        raise ValueError(f"Value error, {error}") from error


def _one_of(choices: Sequence[Any], text: str) -> str:
    if text in choices:
        return text
    *others, last = map(repr, choices)
    raise ValueError(f"Input should be {', '.join(others)} or {last}" if others else f"Input should be {last}")


def _first_of(types: Iterable[Any], text: str) -> Any:
    problems = []
    for wanted in types:
        try:
            return _read(wanted, text)
        except ValueError as error:
            problems.append(str(error))
    raise ValueError("; ".join(problems))


class ListenConfig(Settings):
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(0, ge=0, le=65535, description="Port to listen on; 0: any free port.")

    @property
    def listens_at(self) -> tuple[Address, ...]:
        return (Address("--port", self.host, self.port),)

    @check
    def _ports_are_distinct(self) -> None:
        check_distinct(self.listens_at, self.connects_to)


DRAIN_S = 30.0


class ProcessConfig(Settings):
    cores: Cores | None = Field(None, description="CPU cores to compute on, for example 0,2-3.")
    drain_s: float = Field(
        DRAIN_S,
        ge=0,
        le=3600,
        description="Longest drain, in seconds; requests that a worker still has then continue on other workers.",
    )
    strict_env: bool = Field(False, description="Refuse to start if a BATON_* variable is unknown.")
    run_id: str = Field(
        "", pattern=r"^[A-Za-z0-9]{0,64}$", description="Id of the `baton up` run that started this process."
    )


class ModelSettings(Settings):
    model: Path | None = Field(
        None,
        description="Folder of the checkpoint; a router reads its tokenizer and by default uses the folder of "
        "its workers.",
    )
    model_name: str | None = Field(
        None, description="Name of the model in requests; default of a router: the name that its workers use."
    )


class SecretConfig(Settings):
    secret: str | None = Field(None, has_flag=False, description="The cluster secret itself.")
    secret_file: Path | None = Field(
        None,
        description="File with the secret that all processes of the cluster share (openssl rand -hex 32); a "
        "process without it is not served, and its records in Redis are ignored.",
    )

    @check
    def _secret_is_one(self) -> None:
        if self.secret is not None and self.secret_file is not None:
            raise ValueError("set either BATON_SECRET or BATON_SECRET_FILE, not both")
        _ = self.cluster_secret

    @property
    def cluster_secret(self) -> ClusterSecret | None:
        """Return the cluster secret. Raises: ValueError, only while the configuration is read."""
        text = self.secret_text
        return None if text is None else ClusterSecret(text)

    @property
    def secret_text(self) -> str | None:
        """Return the text of the cluster secret. Raises: ValueError, if its file cannot be read."""
        try:
            text = self.secret if self.secret_file is None else self.secret_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--secret-file: {error}") from error
        return None if text is None else text.strip()


class RegistryConfig(SecretConfig):
    redis_url: str | None = Field(
        None,
        alias="REDIS_URL",
        description="Redis or Valkey with the registry: redis://host:6379/0. With a password or TLS "
        "(rediss://:PASSWORD@host:6380/0?ssl_ca_certs=FILE) set the variable instead: other users "
        "can read arguments.",
    )
    namespace: str = Field(
        "default", pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="Name of the cluster on that Redis."
    )

    @property
    def connects_to(self) -> tuple[Address, ...]:
        if self.redis_url is None:
            return super().connects_to
        return (*super().connects_to, address_of_url("--redis-url", self.redis_url, REDIS_PORT))

    @check
    def _redis_can_be_addressed(self) -> None:
        if self.redis_url is not None:
            try:
                check_redis_url(self.redis_url)
            except ValueError as error:
                raise ValueError(f"--redis-url (BATON_REDIS_URL): {error}") from error


class InternalTlsConfig(SecretConfig):
    internal_tls_ca: Path | None = Field(
        None, description="CA (PEM) of routers and workers; with certificate and key, they accept only each other."
    )
    internal_tls_cert: Path | None = Field(None, description="Certificate (PEM) of this process (baton certs).")
    internal_tls_key: Path | None = Field(None, description="Private key (PEM) of --internal-tls-cert.")

    @check
    def _internal_tls_is_whole(self) -> None:
        files = (self.internal_tls_ca, self.internal_tls_cert, self.internal_tls_key)
        if any(files) and not all(files):
            raise ValueError("set --internal-tls-ca, --internal-tls-cert and --internal-tls-key together")

    @property
    def internal_tls(self) -> "InternalTls | None":
        # Imported here, because it imports gRPC, which --help does not need.
        from baton.process.security.tls import InternalTls

        ca, certificate, key = self.internal_tls_ca, self.internal_tls_cert, self.internal_tls_key
        return InternalTls(ca, certificate, key) if ca and certificate and key else None


class ObjectiveConfig(Settings):
    ttft_slo_ms: float = Field(
        2000.0,
        ge=LEAST_SLO_MS,
        le=MOST_SLO_MS,
        former="planner_ttft_ms",
        description="TTFT objective of requests that have none of their own or of their API key, in milliseconds.",
    )
    tbt_slo_ms: float = Field(
        50.0,
        ge=LEAST_SLO_MS,
        le=MOST_SLO_MS,
        former="planner_tbt_ms",
        description="TBT objective of requests that have none of their own or of their API key, in milliseconds. "
        "Higher values improve TTFT and throughput, lower ones smooth answers.",
    )

    @property
    def objectives(self) -> LatencyObjectives:
        return LatencyObjectives(self.ttft_slo_ms, self.tbt_slo_ms)


class LogConfig(Settings):
    log_format: Literal["plain", "json"] = Field("plain", description="Format of log lines.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest severity that is logged."
    )


class TelemetryConfig(Settings):
    otlp_endpoint: str | None = Field(
        None,
        variable="OTEL_EXPORTER_OTLP_ENDPOINT",
        description="OpenTelemetry collector for traces; over HTTP, /v1/traces is appended.",
    )
    otlp_protocol: Protocol = Field(
        "grpc", variable="OTEL_EXPORTER_OTLP_PROTOCOL", description="Protocol for traces to that collector."
    )
    otlp_traces_endpoint: str | None = Field(
        None,
        variable="OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
        description="Collector for traces; overrides --otlp-endpoint, and nothing is appended.",
    )
    otlp_traces_protocol: Protocol | None = Field(
        None,
        variable="OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
        description="Protocol for traces; overrides --otlp-protocol.",
    )
    trace_file: Path | None = Field(
        None, description="File for traces, one JSON line per span, if there is no collector."
    )

    @property
    def connects_to(self) -> tuple[Address, ...]:
        if self.collector is None:
            return super().connects_to
        return (*super().connects_to, address_of_url("--otlp-endpoint", self.collector.endpoint))

    @check
    def _collector_can_be_reached(self) -> None:
        _ = self.collector

    @property
    def collector(self) -> Collector | None:
        """Return the collector of traces. Raises: ValueError, only while the configuration is read."""
        return choose_collector(
            self.otlp_endpoint, self.otlp_protocol, self.otlp_traces_endpoint, self.otlp_traces_protocol
        )


Config = TypeVar("Config", bound=Settings)


def read_config(config_type: type[Config], arguments: Sequence[str], program: str | None = None) -> Config:
    """Read a configuration from arguments and variables; `--help` prints and exits. Raises: ConfigError."""
    return config_type(**vars(_parser(config_type, program).parse_args(arguments)))


def read_config_or_exit(config_type: type[Config], program: str) -> Config:
    """Read the configuration of a `__main__`; on an error, print it on stderr and exit with code 2."""
    try:
        config = read_config(config_type, sys.argv[1:], program)
        if isinstance(config, ProcessConfig):
            unknown = check_variables(config, config.strict_env)
            return config.but(notices=(*config.notices, *unknown))
        return config
    except ConfigError as error:
        sys.stderr.write(f"{program}: {error}\n")
        raise SystemExit(2) from error


def log_notices(config: Settings) -> None:
    """Log the configuration's warnings. Call it once logging is configured."""
    for notice in config.notices:
        logger.warning("%s", notice)


def check_variables(config: ProcessConfig, strict: bool) -> tuple[str, ...]:
    """Return warnings about unknown BATON_* variables. Processes started by `baton up` return none, since it warns.

    Raises: ConfigError if `strict` and there are warnings.
    """
    unknown = () if config.run_id else tuple(unknown_variables(os.environ))
    if unknown and strict:
        raise ConfigError("; ".join((*unknown, "refused by --strict-env (BATON_STRICT_ENV)")))
    return unknown


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _parser(config_type: type[Settings], program: str | None) -> ArgumentParser:
    """Return a parser with one flag per field, grouped by the class that declares the field first.

    If a flag is absent, the parsed result has no attribute for it, so that the variable or the default applies.
    """
    parser = _Parser(prog=program, description=config_type.__doc__, allow_abbrev=False, argument_default=SUPPRESS)
    parser.usage = "%(prog)s [FLAG ...]"
    left = {name: info for name, info in config_type.fields.items() if info.has_flag}
    for declaring in reversed(config_type.__mro__):
        own = [left.pop(name) for name in vars(declaring).get("_own_fields", ()) if name in left]
        if own:
            group = parser.add_argument_group(_words(declaring.__name__.removesuffix("Config")))
            for info in own:
                _add_flag(group, info)
    return parser


def _add_flag(group: _ArgumentGroup, info: FieldInfo) -> None:
    if info.annotation is bool:
        group.add_argument(info.flag, dest=info.name, action=BooleanOptionalAction, help=info.help)
    else:
        action = "append" if info.is_repeatable else "store"
        group.add_argument(info.flag, dest=info.name, action=action, metavar=info.metavar, help=info.help)
    if info.former_flag is not None:
        group.add_argument(info.former_flag, dest=_FORMER + info.name, help=SUPPRESS)


def _words(name: str) -> str:
    """Split a class name into words: InternalTls -> `internal tls`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()
