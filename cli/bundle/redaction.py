"""Redaction: settings are shown by an allow-list of names, and known or likely secrets are removed from every text."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from baton.process.config import FieldInfo
from baton.process.security.api_keys import KEY_PREFIX
from baton.router.config import RouterConfig
from baton.worker.config import WorkerConfig

GIVEN = "[given, not shown]"
REDACTED = "[redacted]"

Kind = Literal["text", "path", "url", "adapters", "workers", "origins"]

_TEXTS = {"host", "admin_host", "http_host", "advertise", "namespace", "worker_id", "model_name", "device", "role"}
_TEXTS |= {"transfer_interface", "allowed_hosts", "run_id"}
_PATHS = {"model", "trace_file", "core_use", "spare_core_use", "chunk_file", "step_file", "kv_tier_dir"}
_URLS = {"redis_url", "otlp_endpoint", "otlp_traces_endpoint"}
_OF_ROLES = {"chunk_tokens", "tail_tokens", "lease_s", "park_s", "fetch", "fetch_timeout_s", "decode_slow_down"}
_OF_ROLES |= {"spare_cores", "nice", "max_sequences", "swap_memory", "kept_answers", "kept_tokens", "role_drain_s"}
_OF_UP = {"prefill", "decode", "colocated", "routers", "startup_timeout"}

_VARIABLES: Mapping[str, Kind] = {
    "REDIS_URL": "url",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "url",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "url",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "text",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "text",
    "OTEL_SERVICE_NAME": "text",
    "OTEL_SDK_DISABLED": "text",
    "OTEL_TRACES_SAMPLER": "text",
    "OTEL_TRACES_SAMPLER_ARG": "text",
    "OMP_NUM_THREADS": "text",
    "MKL_NUM_THREADS": "text",
    "OPENBLAS_NUM_THREADS": "text",
    "CUDA_VISIBLE_DEVICES": "text",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "text",
    "NVIDIA_VISIBLE_DEVICES": "text",
    "NCCL_DEBUG": "text",
    "NCCL_SOCKET_IFNAME": "text",
    "HF_HUB_OFFLINE": "text",
    "LD_PRELOAD": "path",
    "BATON_TARGET": "text",
}
"""Kinds of variables that are no settings of Baton."""
_PREFIXES = ("BATON_", "OTEL_")
"""Variables whose names are always shown."""

_WORD = re.compile(r"(?!.*//)[\w.,:%+/=*\[\]-]{0,200}")
"""Form of a shown setting: no white space, quotes or URL."""
_PATH = re.compile(r"[^\n\"']{0,300}")
_WORKERS = re.compile(r"((prefill|decode)@[\w.:\[\]-]+,?)+")
_ORIGINS = re.compile(r"((https?://[\w.:\[\]-]+|\*),?)+")


def _kinds() -> dict[str, Kind]:
    """Return the kind of each shown field; numbers, choices and switches are never secrets."""
    fields: dict[str, FieldInfo] = {**RouterConfig.fields, **WorkerConfig.fields}
    kinds: dict[str, Kind] = {
        name: "text" for name, info in fields.items() if not re.search(r"\bstr\b|Path", _annotation(info))
    }
    kinds |= dict.fromkeys(_TEXTS | _OF_ROLES | _OF_UP, "text")
    kinds |= dict.fromkeys(_PATHS, "path")
    kinds |= dict.fromkeys(_URLS, "url")
    return kinds | {"adapter": "adapters", "workers": "workers", "cors_origins": "origins"}


def _annotation(info: FieldInfo) -> str:
    annotation = info.annotation
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


_KINDS = _kinds()


def shown(name: str, value: str) -> str:
    """Return the value of a setting, or GIVEN in its place."""
    return _as_kind(_KINDS.get(name), value)


def shown_flags(arguments: Sequence[str]) -> dict[str, str]:
    """Return the flags of a process, from the arguments after its module's name."""
    found: dict[str, str] = {}
    for index, argument in enumerate(arguments):
        if not argument.startswith("--"):
            continue
        flag, equals, value = argument.partition("=")
        if not equals:
            following = arguments[index + 1] if index + 1 < len(arguments) else "--"
            value = "" if following.startswith("--") else following
        name = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
        if not re.fullmatch(r"[a-z_]{1,64}", name):
            continue  # not a flag of Baton
        text = shown(name, value) if value else "on" if not flag.startswith("--no-") else "off"
        found[flag] = f"{found[flag]} {text}" if flag in found else text
    return found


def shown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of Baton, OpenTelemetry and numeric libraries, and not even the names of others."""
    found = {}
    for name, value in sorted(environment.items()):
        kind = _VARIABLES.get(name)
        if kind is None and name.startswith(_PREFIXES):
            kind = _KINDS.get(name.removeprefix("BATON_").lower())
        elif kind is None:
            continue
        found[name] = _as_kind(kind, value)
    return found


def _as_kind(kind: Kind | None, value: str) -> str:
    match kind:
        case "text" if _WORD.fullmatch(value):
            return value
        case "workers" if _WORKERS.fullmatch(value):
            return value
        case "origins" if _ORIGINS.fullmatch(value):
            return value
        case "path" if _PATH.fullmatch(value):
            return value
        case "url":
            return _address_of(value)
        case "adapters":
            return ",".join(part.partition("=")[0] for part in value.split(",") if _WORD.fullmatch(part))
    return GIVEN


def _address_of(url: str) -> str:
    """Return scheme, host and port; the rest may be secret."""
    try:
        parts = urlsplit(url if "//" in url else f"//{url}")
        port = parts.port
    except ValueError:
        return GIVEN
    if not parts.hostname or not re.fullmatch(r"[\w.:-]+", parts.hostname):
        return GIVEN
    return (f"{parts.scheme}://" if parts.scheme else "") + parts.hostname + (f":{port}" if port else "")


_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|HEADER|AUTH|COOKIE|HASHES|PRIVATE", re.IGNORECASE)
_USER_IN_URL = re.compile(r"://([^/\s@'\"]+)@")
_LOOKS_SECRET = (
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
    re.compile(r"(?<=://)[^/\s@'\"]+(?=@)"),
    re.compile(r"(?i)(?<=\bbearer )[\w.~+/=-]{4,}"),
    re.compile(r"(?i)(?<=\bbasic )[\w+/=-]{8,}"),
    re.compile(rf"\b{re.escape(KEY_PREFIX)}[A-Za-z0-9_-]{{32,}}"),
    re.compile(r"\b(sk|hf|pk|rk|ghp|gho|ghs|glpat|xox[abp]|github_pat)[-_][A-Za-z0-9_-]{12,}"),
    re.compile(r"\b(AKIA|ASIA)[A-Z0-9]{16}\b"),
    re.compile(r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"),
)
_NAMED = re.compile(
    r"(?i)\b((?:[a-z_-]*[_-])?(?:password|passwd|secret|token|api[_-]?key|authorization|credentials?|cookie))"
    r"(\"?'?\s*[=:]\s*\"?'?)(?!\[|bearer |basic )[^\s\"',;&}]{3,}"
)


@dataclass(frozen=True, slots=True)
class Redactor:
    """Removes secrets from texts, by value and by form, and writes `home` as `~`."""

    secrets: tuple[str, ...]
    home: str | None = None

    def clean(self, text: str) -> str:
        for secret in self.secrets:
            text = text.replace(secret, REDACTED)
        for pattern in _LOOKS_SECRET:
            text = pattern.sub(REDACTED, text)
        text = _NAMED.sub(lambda found: f"{found[1]}{found[2]}{REDACTED}", text)
        if self.home is not None:
            text = re.sub(rf"{re.escape(self.home)}(?=[/\s\"',:)]|$)", "~", text, flags=re.MULTILINE)
        return text


def redactor_for(environments: Iterable[Mapping[str, str]], home: Path | None) -> Redactor:
    """Return a redactor that knows the secrets in these environments."""
    found = {secret for environment in environments for secret in _secrets_in(environment)}
    # Longest first: one may be part of another.
    by_length = sorted(found, key=lambda secret: (-len(secret), secret))
    return Redactor(tuple(by_length), str(home) if home is not None and len(home.parts) > 1 else None)


def _secrets_in(environment: Mapping[str, str]) -> Iterator[str]:
    for name, value in environment.items():
        if _SECRET_NAME.search(name) and not value.startswith("/"):
            # Headers are lists of NAME=VALUE, so each value is a secret, too.
            yield from (part for part in (value, *re.split(r"[\s,;=]+", value)) if len(part) >= 6)
        for user in _USER_IN_URL.findall(value):
            yield from (part for part in user.split(":") if len(part) >= 4)
