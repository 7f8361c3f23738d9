"""Flags that several commands share, parsers of their values, and flags made from fields of a configuration."""

import sys
from collections.abc import Callable
from copy import copy
from dataclasses import MISSING, field, fields
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from baton.process.config import REQUIRED, ByteSize, Settings
from baton.text import model_options
from baton.worker.config import WorkerConfig

Value = TypeVar("Value")


def parse_bytes(text: str) -> int:
    """Parse an amount of memory: `1.5GiB` -> 1610612736. Raises: ValueError."""
    return int(ByteSize.read(text))


def format_bytes(count: int) -> str:
    """Format an amount of memory: 1610612736 -> `1.5 GiB`."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} B"


VARIABLES_PREFIX = "BATON"
DEFAULT_TARGET = "127.0.0.1:50051"
TARGET_VARIABLE = f"{VARIABLES_PREFIX}_TARGET"


class TokenIdList(tuple[int, ...]):
    """Token ids of one option. Not a plain tuple, which typer would take for several arguments."""


def read_token_ids(text: str) -> TokenIdList:
    """Parse token ids: `5,17,3` -> (5, 17, 3). Raises: ValueError."""
    try:
        return TokenIdList(int(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise ValueError(f"{text!r} is not a list of token ids such as 5,17,3") from error


def read_sizes(text: str, flag: str) -> tuple[int, ...]:
    """Parse sizes: `1,16` -> (1, 16). Raises: typer.BadParameter."""
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a list of sizes such as 1,16", param_hint=flag) from error
    if min(sizes) < 1:
        raise typer.BadParameter("sizes are 1 or more", param_hint=flag)
    return sizes


def checked(read: Callable[[Any], Value]) -> Callable[[Any], Value]:
    """Return a parser that calls `read` and raises its ValueError as typer.BadParameter."""

    def parser(text: Any) -> Value:
        try:
            return read(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    return parser


def option_of(config: type[Settings], name: str, *declarations: str, note: str = "", **given: Any) -> OptionInfo:
    """Return a typer option with the description, bounds and parser of a configuration's field.

    `note`: a sentence that `up` adds to the description. `given`: further arguments of the typer option.
    """
    info = config.fields[name]
    bounds: dict[str, Any] = {"min": info.bounds.get("ge"), "max": info.bounds.get("le")}
    text = f"{info.description}{f' {note}' if note else ''}"
    if _is_byte_size(info.annotation):
        text += "" if note else f" Default: {info.default_text}."
        bounds, given = {}, {"parser": checked(parse_bytes), "metavar": "512MiB", **given}
    given |= {"help": text, "callback": checked(info.check), **bounds}
    option: OptionInfo = typer.Option(..., *declarations, **given)
    return option


def of_field(config: type[Settings], name: str, *declarations: str, **given: Any) -> Any:
    """Return a dataclass field for an options class, with option, type and default of a configuration's field.

    `default` and `kind` replace the field's default and type. The default of an amount of memory is None.
    """
    info = config.fields[name]
    is_size = _is_byte_size(info.annotation)
    default = given.pop("default", None if is_size or info.default is REQUIRED else info.default)
    kind = given.pop("kind", int if is_size else info.annotation)
    if default is None:
        kind = kind | None
    return field(default=default, metadata={"hint": Annotated[kind, option_of(config, name, *declarations, **given)]})


def _is_byte_size(annotation: Any) -> bool:
    return ByteSize in (annotation, *get_args(annotation))


def flags_of(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with one flag per field of the dataclass that is the last parameter of `command`.

    A parameter before it, typer's context, remains. `PANELS` of the dataclass maps the first field of each group to the
    group's title in `--help`.
    """
    *others, last = signature(command).parameters.values()
    options = last.annotation
    hints = get_type_hints(options, include_extras=True)

    @wraps(command)
    def with_flags(**flags: Any) -> None:
        passed = [flags.pop(each.name) for each in others]
        command(*passed, options(**flags))

    parameters, panels, panel = [*others], getattr(options, "PANELS", {}), None
    for each in fields(options):
        panel = panels.get(each.name, panel)
        default = Parameter.empty if each.default is MISSING else each.default
        hint = _in_panel(each.metadata.get("hint", hints[each.name]), panel)
        parameters.append(Parameter(each.name, Parameter.KEYWORD_ONLY, default=default, annotation=hint))
    with_flags.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return with_flags


def _in_panel(hint: Any, panel: str | None) -> Any:
    """Return a copy of an option, which `--help` lists below `panel`. Other commands use the original option."""
    kind, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint, typer.Option())
    copies = [copy(mark) for mark in marks]
    for mark in copies:
        if isinstance(mark, OptionInfo):
            mark.rich_help_panel = panel
    return Annotated[kind, *copies]


def _find_target(context: typer.Context, given: str) -> str:
    """Return the target that the user gave, else that of the newest service on this machine, else the default."""
    from baton.launch.paths import RUNTIME
    from baton.launch.run_record import running_services

    source = context.get_parameter_source("target")
    if context.resilient_parsing or source is None or source.name != "DEFAULT":
        return given
    running = [record.targets[0] for record in running_services(RUNTIME)]
    if len(running) > 1:
        print(
            f"baton: using the newest service, {running[0]}; --target selects {', '.join(running[1:])}", file=sys.stderr
        )
    return running[0] if running else given


Target = Annotated[
    str,
    typer.Option(
        "--target",
        "--router",
        envvar=TARGET_VARIABLE,
        callback=_find_target,
        help="gRPC address of the router, host:port; several routers of a cluster: host:port,host:port. Default: the "
        "newest `baton up` on this machine.",
    ),
]
Admin = Annotated[
    str | None,
    typer.Option(
        help="Admin address of the router, host:port; default: the admin port of --target if `baton up` runs it here, "
        "else the port after that of --target."
    ),
]
TlsCa = Annotated[
    Path | None,
    typer.Option(
        envvar="BATON_TLS_CA", exists=True, dir_okay=False, help="CA certificate (PEM) of the server; turns TLS on."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object per line instead of text.")]
ModelFolder = Annotated[
    str | None,
    typer.Option(help="Folder, GGUF file, Hugging Face id (owner/name:Q4_K_M) or smollm2; default: the demo model."),
]
Dtype = Annotated[model_options.ComputeDtype, option_of(WorkerConfig, "dtype")]
Quantize = Annotated[model_options.Quantize, option_of(WorkerConfig, "quantize")]
KvCacheDtype = Annotated[model_options.KvCacheDtype, option_of(WorkerConfig, "kv_cache_dtype")]
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="NAME=FOLDER",
        help="LoRA adapter in PEFT's format; requests choose it by NAME as their model. May be repeated.",
    ),
]
KV_MEMORY_NOTE = "Default here: a share of the machine's memory."


def admin_target_of(target: str) -> str:
    """Return each target's admin addresses: those of all routers of a service on this machine, by its record, else the
    target's port + 1.

    `host:50051` -> `host:50052`.
    """
    from baton.launch.paths import RUNTIME
    from baton.launch.run_record import running_services

    running = running_services(RUNTIME)
    known = {target: ",".join(each.admin_targets) for each in running for target in each.targets}
    admins = []
    for each in target.split(","):
        host, _, port = each.strip().rpartition(":")
        if not host or not (port.isascii() and port.isdigit()):
            raise typer.BadParameter(f"{each!r} is not host:port; --admin names the admin port", param_hint="--target")
        if ":" in host and not (host.startswith("[") and host.endswith("]")):
            raise typer.BadParameter(f"{each!r}: put an IPv6 address in brackets", param_hint="--target")
        admins.append(known.get(each.strip(), f"{host}:{int(port) + 1}"))
    return ",".join(admins)


def read_prompt(text: str) -> str:
    """Return the text itself, or standard input for `-`."""
    return sys.stdin.read() if text == "-" else text


STATUS_COLUMNS = {
    "worker": "id of the worker",
    "state": "connected, draining, or lost: it has no link with this router",
    "restarts": "number of times that its process was gone without a drain",
    "running": "sequences in the batch",
    "pending": "requests waiting in the worker",
    "pending tokens": "prompt tokens still to compute",
    "blocks": "KV blocks in use / in the pool",
    "pinned": "blocks in use that a decode worker has yet to read",
    "cached": "blocks in the prefix cache, evicted when others need them",
    "hit rate": "share of prompt tokens found in the prefix cache",
    "preempted": "sequences that gave up their blocks and continue later",
    "pid": "of the worker's process",
    "endpoint": "host:port of the worker",
}
"""The meaning of each column of `baton status`, for its --help."""


def status_legend() -> str:
    """Return the help on the columns of `baton status`, a paragraph each."""
    return "\n\n".join(f"{name}: {meaning}." for name, meaning in STATUS_COLUMNS.items())
