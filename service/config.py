"""One frozen configuration per process, from command-line flags and BATON_* variables. The only reader of either.

    class RouterConfig(ListenConfig, RegistryConfig, LogConfig): ...
    config = read_config_or_exit(RouterConfig, program=".venv/bin/python -m baton.router")

Field `kv_memory` is the flag `--kv-memory` and the variable `BATON_KV_MEMORY`; the flag wins. Values are texts on both
ways, and the field's type reads them.
"""

import sys
from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Self, TypeVar, get_args, get_origin

try:
    from pydantic import BeforeValidator, ByteSize, Field, ValidationError, model_validator
    from pydantic.fields import FieldInfo
    from pydantic_settings import BaseSettings, SettingsConfigDict
except ModuleNotFoundError:  # on a machine that has only a worker's necessary packages
    from baton.service.plain_settings import (  # type: ignore[assignment, no-redef]
        BaseSettings,
        BeforeValidator,
        ByteSize,
        Field,
        FieldInfo,
        SettingsConfigDict,
        ValidationError,
        model_validator,
    )

from baton.service.adapter_folder import AdapterFolder, parse_adapters
from baton.service.affinity import parse_cores
from baton.service.registry.worker_record import WorkerRecord, parse_workers
from baton.service.security.tls import InternalTls

__all__ = [
    "Adapters",
    "ByteSize",
    "ConfigError",
    "Cores",
    "Field",
    "InternalTlsConfig",
    "ListenConfig",
    "LogConfig",
    "RegistryConfig",
    "Settings",
    "TelemetryConfig",
    "Workers",
    "model_validator",
    "read_config",
    "read_config_or_exit",
]

Cores = Annotated[
    frozenset[int], BeforeValidator(lambda value: parse_cores(value) if isinstance(value, str) else value)
]
"""A list of CPU cores, written `0,2-3`. (Sizes in bytes: `ByteSize`, written `512MiB`.)"""

Workers = Annotated[
    tuple[WorkerRecord, ...], BeforeValidator(lambda value: parse_workers(value) if isinstance(value, str) else value)
]
"""Workers given by hand, written `prefill@host:port,decode@host:port`."""


class Repeatable:
    """Marks a type of which a flag may be given several times; its validator then gets the list of texts."""


Adapters = Annotated[
    tuple[AdapterFolder, ...],
    BeforeValidator(lambda value: parse_adapters(value) if isinstance(value, str | list) else value),
    Repeatable(),
]
"""Adapters written `NAME=FOLDER`, a flag for each; as a variable, with commas between them."""

Config = TypeVar("Config", bound="Settings")


class ConfigError(Exception):
    """A flag or variable is missing, unknown or wrong; the message names it."""


class Settings(BaseSettings):
    """Base of every configuration."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix="BATON_",
        env_ignore_empty=True,
        enable_decoding=False,
        populate_by_name=True,
    )


class ListenConfig(Settings):
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(0, ge=0, le=65535, description="port to listen on, 0 takes a free one")


class RegistryConfig(Settings):
    redis_url: str | None = Field(None, description="Redis or Valkey that holds the registry")
    namespace: str = Field(
        "default", pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="name of the cluster on that Redis"
    )


class InternalTlsConfig(Settings):
    internal_tls_ca: Path | None = Field(
        None, description="CA (PEM) of router and workers: with these three they accept only each other"
    )
    internal_tls_cert: Path | None = Field(None, description="certificate (PEM) of this process (baton certs)")
    internal_tls_key: Path | None = Field(None, description="private key (PEM) of --internal-tls-cert")

    @model_validator(mode="after")
    def _internal_tls_is_whole(self) -> Self:
        files = (self.internal_tls_ca, self.internal_tls_cert, self.internal_tls_key)
        if any(files) and not all(files):
            raise ValueError("--internal-tls-ca, --internal-tls-cert and --internal-tls-key go together")
        return self

    @property
    def internal_tls(self) -> InternalTls | None:
        ca, certificate, key = self.internal_tls_ca, self.internal_tls_cert, self.internal_tls_key
        return InternalTls(ca, certificate, key) if ca and certificate and key else None


class LogConfig(Settings):
    log_format: Literal["plain", "json"] = Field("plain", description="format of log lines")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="lowest severity that is logged"
    )


class TelemetryConfig(Settings):
    otlp_endpoint: str | None = Field(
        None, validation_alias="OTEL_EXPORTER_OTLP_ENDPOINT", description="OpenTelemetry collector for traces (gRPC)"
    )
    otlp_protocol: Literal["grpc"] = Field(
        "grpc", validation_alias="OTEL_EXPORTER_OTLP_PROTOCOL", description="how traces are sent to that collector"
    )
    trace_file: Path | None = Field(
        None, description="file for traces, one JSON line per span, if there is no collector"
    )


def read_config(config_type: type[Config], arguments: Sequence[str], program: str | None = None) -> Config:
    """Raises ConfigError; `--help` prints and leaves the process (SystemExit)."""
    flags = vars(_parser(config_type, program).parse_args(arguments))
    try:
        return config_type(**flags)
    except ValidationError as error:
        raise ConfigError("; ".join(_describe(config_type, problem) for problem in error.errors())) from error


def read_config_or_exit(config_type: type[Config], program: str) -> Config:
    """For a `__main__`: errors go to stderr, exit code 2."""
    try:
        return read_config(config_type, sys.argv[1:], program)
    except ConfigError as error:
        sys.stderr.write(f"{program}: {error}\n")
        raise SystemExit(2) from error


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _parser(config_type: type[Settings], program: str | None) -> ArgumentParser:
    """A flag per field. An absent flag leaves no trace, so that the variable or the default applies."""
    parser = _Parser(prog=program, description=config_type.__doc__, allow_abbrev=False, argument_default=SUPPRESS)
    for name, field in config_type.model_fields.items():
        help_text = f"{field.description or ''} ({_default(field)}; {_variable(name, field)})".replace(
            "%", "%%"
        ).lstrip()
        key = field.validation_alias if isinstance(field.validation_alias, str) else name
        if field.annotation is bool:
            parser.add_argument(_flag(name), dest=key, action=BooleanOptionalAction, help=help_text)
        elif any(isinstance(mark, Repeatable) for mark in field.metadata):
            parser.add_argument(_flag(name), dest=key, action="append", metavar=_metavar(name, field), help=help_text)
        else:
            parser.add_argument(_flag(name), dest=key, metavar=_metavar(name, field), help=help_text)
    return parser


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _variable(name: str, field: FieldInfo) -> str:
    return field.validation_alias if isinstance(field.validation_alias, str) else f"BATON_{name.upper()}"


def _metavar(name: str, field: FieldInfo) -> str:
    if get_origin(field.annotation) is Literal:
        return "|".join(map(str, get_args(field.annotation)))
    return name.rpartition("_")[2].upper()


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return f"default: {'none' if field.default in (None, ()) else field.default}"


def _describe(config_type: type[Settings], problem: Any) -> str:
    """Name the flag and the variable; `loc` starts with the field's name or its alias."""
    located = str(problem["loc"][0]) if problem["loc"] else "configuration"
    for name, field in config_type.model_fields.items():
        if located in (name, field.validation_alias):
            return f"{_flag(name)} ({_variable(name, field)}): {problem['msg']}"
    return f"{located}: {problem['msg']}"
