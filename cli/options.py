"""Amounts of memory as people write them: `512MiB`, `1.5GiB`, `200000`."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from baton.launch.process_plan import COLOCATED_TBT_SLO_MS

if TYPE_CHECKING:
    from baton.client import GenerateOptions

UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9}
PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)\s*", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """`1.5GiB` -> 1610612736. Raises ValueError that names the accepted forms."""
    match = PATTERN.fullmatch(text)
    unit = match[2].upper() if match else "?"
    unit = unit if unit in UNITS else f"{unit}B"
    if match is None or unit not in UNITS:
        raise ValueError(f"{text!r} is not an amount of memory such as 512MiB or 2GiB")
    return int(float(match[1]) * UNITS[unit])


def format_bytes(count: int) -> str:
    """1610612736 -> `1.5 GiB`."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} B"


VARIABLES_PREFIX = "BATON"
DEFAULT_TARGET = "127.0.0.1:50051"
TARGET_VARIABLE = f"{VARIABLES_PREFIX}_TARGET"


class TokenIdList(tuple[int, ...]):
    """A type of its own, because typer reads a plain tuple as an option with several arguments."""


def read_token_ids(text: str) -> TokenIdList:
    """`5,17,3` -> (5, 17, 3). Raises ValueError."""
    try:
        return TokenIdList(int(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise ValueError(f"{text!r} is not a list of token ids such as 5,17,3") from error


def read_sizes(text: str, flag: str) -> tuple[int, ...]:
    """`1,16` -> (1, 16). Raises: typer.BadParameter."""
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a list of sizes such as 1,16", param_hint=flag) from error
    if min(sizes) < 1:
        raise typer.BadParameter("sizes are 1 or more", param_hint=flag)
    return sizes


def _token_ids(text: str) -> TokenIdList:
    try:
        return read_token_ids(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


Target = Annotated[
    str,
    typer.Option(
        envvar=TARGET_VARIABLE,
        help="gRPC address of the router, host:port; several of one cluster: host:port,host:port.",
    ),
]
Admin = Annotated[
    str | None, typer.Option(help="Admin address of the router, host:port; default: the port after that of --target.")
]
TlsCa = Annotated[
    Path | None,
    typer.Option(
        envvar="BATON_TLS_CA", exists=True, dir_okay=False, help="CA certificate (PEM) of the server; turns TLS on."
    ),
]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose", "-v", help="After each answer, on stderr: TTFT, tokens per second, cached prompt tokens."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object per line instead of text.")]
Model = Annotated[str | None, typer.Option(help="Name of the model or of an adapter; default: the model.")]
System = Annotated[str | None, typer.Option(help="System message before the conversation.")]
TokenIds = Annotated[
    TokenIdList | None,
    typer.Option(parser=_token_ids, metavar="5,17,...", help="Token ids in place of a text."),
]
MaxTokens = Annotated[int | None, typer.Option(help="Most tokens to generate per choice.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy.")]
TopP = Annotated[float | None, typer.Option(help="Keep the likeliest tokens that add up to this; in (0, 1].")]
TopK = Annotated[int | None, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")]
MinP = Annotated[float | None, typer.Option(help="Keep tokens at least this fraction as likely as the likeliest.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same answer.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")]
StopTokenIds = Annotated[
    TokenIdList | None,
    typer.Option(parser=_token_ids, metavar="2,7,...", help="Token ids that end the answer."),
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's end of sequence.")]
Choices = Annotated[int | None, typer.Option("--n", help="Number of choices.")]
TypicalP = Annotated[float | None, typer.Option(help="Keep the most typical tokens that add up to this; in (0, 1].")]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Penalty on tokens of prompt and answer, in (0, 10]; above 1 makes them rarer.")
]
PresencePenalty = Annotated[
    float | None, typer.Option(help="Penalty on tokens that the answer has already, in [-2, 2].")
]
FrequencyPenalty = Annotated[float | None, typer.Option(help="Penalty per occurrence in the answer, in [-2, 2].")]
MinTokens = Annotated[int | None, typer.Option(help="Least tokens of a choice before anything stops it.")]
Logprobs = Annotated[
    int | None,
    typer.Option(help="With --json: log-probabilities of each token and of the N likeliest, N from 0 to 20."),
]
PromptLogprobs = Annotated[int | None, typer.Option(help="With --json: the same for the prompt; from 0 to 20.")]
Echo = Annotated[bool, typer.Option("--echo", help="Begin the answer with the prompt; --logprobs then covers both.")]
BestOf = Annotated[int | None, typer.Option(help="Generate N choices and show the --n likeliest per token at the end.")]
BeamWidth = Annotated[
    int | None,
    typer.Option(help="Beam search with N beams; shows the --n best sequences at the end."),
]
LengthPenalty = Annotated[
    float | None, typer.Option(help="Length penalty of the beam search; above 0 favours long answers.")
]
JsonSchema = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="File with a JSON schema; the answer is JSON that meets it."),
]
JsonObject = Annotated[bool | None, typer.Option("--json-object", help="The answer is a JSON object.")]
Regex = Annotated[str | None, typer.Option(help="All of the answer matches this regular expression.")]
Grammar = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="File with a grammar in Lark; the answer is what `start` makes."),
]
Choice = Annotated[list[str] | None, typer.Option(help="The answer is one of these texts; may be repeated.")]
TimeoutS = Annotated[float | None, typer.Option("--timeout", help="Seconds for the whole answer.")]
Quantize = Annotated[
    Literal["none", "int8", "int4", "fp8"],
    typer.Option(
        help="Quantise the weights of a plain checkpoint while loading. AWQ, GPTQ and GGUF are read as they are."
    ),
]
KvCacheDtype = Annotated[
    Literal["auto", "float32", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"],
    typer.Option(
        help="Element type of the KV cache; auto: as --dtype; fp8: fp8_e4m3. One-byte types hold more tokens."
    ),
]
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="NAME=FOLDER",
        help="LoRA adapter in PEFT's format; requests choose it by NAME as their model. May be repeated.",
    ),
]
SwapMemory = Annotated[
    int | None,
    typer.Option(
        parser=_bytes,
        metavar="256MiB",
        help="Host memory of each decode worker for KV of preempted answers, allocated when first needed. 0: the KV is "
        "recomputed. Default: 256MiB.",
    ),
]
TbtSloMs = Annotated[
    float | None,
    typer.Option(
        min=1,
        help="Longest step of a decode worker with prompts in it, in milliseconds: how long running answers may wait "
        "for a token. Higher values give earlier first tokens and more throughput, lower ones smoother answers. "
        f"Default: {COLOCATED_TBT_SLO_MS:g} with --colocated; otherwise prompts make a step at most a tenth longer.",
    ),
]
TensorParallel = Annotated[
    int,
    typer.Option(
        min=1,
        max=64,
        help="Ranks of each worker, each with its share of heads, weights and KV: one GPU per rank, or on CPU a share "
        "of the worker's cores.",
    ),
]
KvMemory = Annotated[
    int | None,
    typer.Option(parser=_bytes, metavar="512MiB", help="KV pool of each worker; default: a share of the memory."),
]


def admin_target_of(target: str) -> str:
    """`host:50051` -> `host:50052`, the default of `baton up --admin-port`; of several targets, each."""
    admins = []
    for each in target.split(","):
        host, _, port = each.strip().rpartition(":")
        if not host or not (port.isascii() and port.isdigit()):
            raise typer.BadParameter(f"{each!r} is not host:port; --admin names the admin port", param_hint="--target")
        admins.append(f"{host}:{int(port) + 1}")
    return ",".join(admins)


def sampling_options(flags: Mapping[str, Any]) -> "GenerateOptions":
    """Of a command's flags by name, those for the server, and only given ones: the model decides the rest."""
    from baton.client.requests import GenerateOptions

    given: dict[str, Any] = {}
    for name in flags.keys() & GenerateOptions.__annotations__.keys():
        value = flags[name]
        if isinstance(value, Path):
            given[name] = value.read_text(encoding="utf-8")
        elif isinstance(value, list | tuple) and not isinstance(value, TokenIdList):  # of a flag that may be repeated
            given |= {name: list(value)} if value else {}
        elif value is not None and value is not False:
            given[name] = value
    if flags["timeout"] is not None:
        given["timeout_s"] = flags["timeout"]
    return cast(GenerateOptions, given)


def check_logprobs(logprobs: int | None, json: bool, flag: str = "--logprobs") -> None:
    """Raises: typer.BadParameter where they would not be shown."""
    if logprobs is not None and not json:
        raise typer.BadParameter("needs --json, which shows them", param_hint=flag)


def read_prompt(text: str) -> str:
    """The text itself; `-` stands for standard input."""
    return sys.stdin.read() if text == "-" else text


STATUS_COLUMNS = {
    "worker": "id of the worker",
    "state": "connected, draining, or lost: it has no session with this router",
    "restarts": "how often its process was found gone without a drain",
    "running": "sequences in the batch",
    "pending": "requests that wait in the worker",
    "pending tokens": "prompt tokens not computed yet",
    "blocks": "KV blocks in use / in the pool",
    "pinned": "of those in use, blocks that a decode worker has yet to read",
    "cached": "blocks in the prefix cache, evicted when others need them",
    "hit rate": "share of prompt tokens found in the prefix cache",
    "preempted": "sequences that gave their blocks back for a while",
    "pid": "of the worker's process",
    "endpoint": "host:port of the worker",
}
"""The meaning of each column of `baton status`, for its --help."""


def status_legend() -> str:
    """A paragraph for each column."""
    return "\n\n".join(f"{name}: {meaning}." for name, meaning in STATUS_COLUMNS.items())
