"""Redaction: only harmless values of known settings are shown; known and likely secrets are removed from all texts."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from urllib.parse import urlsplit

from baton.cli.up_options import UpOptions
from baton.elastic_worker.config import ElasticConfig
from baton.process.config import FieldInfo
from baton.process.security.api_keys import KEY_PREFIX
from baton.router.config import RouterConfig

GIVEN = "[given, not shown]"
REDACTED = "[redacted]"

_SETTINGS: Mapping[str, FieldInfo] = {**RouterConfig.fields, **ElasticConfig.fields}
_UP_OPTIONS = {each.name for each in fields(UpOptions)} - _SETTINGS.keys()
_LIBRARY_VARIABLES = re.compile(
    r"REDIS_URL|BATON_TARGET|OTEL_(EXPORTER_OTLP_(TRACES_)?(ENDPOINT|PROTOCOL)|SERVICE_NAME|SDK_DISABLED)"
    r"|OTEL_TRACES_SAMPLER(_ARG)?|(OMP|MKL|OPENBLAS)_NUM_THREADS|(CUDA|NVIDIA)_VISIBLE_DEVICES"
    r"|CUDA_MPS_ACTIVE_THREAD_PERCENTAGE|NCCL_(DEBUG|SOCKET_IFNAME)|HF_HUB_OFFLINE|LD_PRELOAD"
)
"""Variables that are not settings of Baton's processes and contain no secret."""
_NAMED_PREFIXES = ("BATON_", "OTEL_")
"""Prefixes of variables whose names are shown even if their values are not."""

_SECRET_SETTING = re.compile(r"key|secret|tls|hashes|token")
_TEXT_TYPE = re.compile(r"\bstr\b|Path")
_PLAIN = re.compile(r"[\w.,:%+/=*@~\[\]-]{0,300}")
_ORIGINS = re.compile(r"((https?://[\w.:\[\]-]+|\*),?)+")
_USER = re.compile(r"(?<!\bprefill)(?<!\bdecode)@")
"""Separator of user and host, except in `prefill@host:port` (--workers)."""


def shown(name: str, value: str) -> str:
    """Return the value of a setting, or GIVEN in its place if it may be secret."""
    return _harmless(value) if _is_public(name) else GIVEN


def _is_public(name: str) -> bool:
    """Return whether a setting is known and not secret. A text or path is secret if the setting's name suggests it."""
    info = _SETTINGS.get(name)
    if info is None:
        return name in _UP_OPTIONS
    annotation = info.annotation.__name__ if isinstance(info.annotation, type) else str(info.annotation)
    return not (_TEXT_TYPE.search(annotation) and _SECRET_SETTING.search(name))


def _harmless(value: str) -> str:
    """Return a word, path or address unchanged, another URL as scheme, host and port, anything else as GIVEN."""
    if _ORIGINS.fullmatch(value):
        return value
    if "//" in value or _USER.search(value):
        return _address_of(value)
    return value if _PLAIN.fullmatch(value) else GIVEN


def shown_flags(arguments: Sequence[str]) -> dict[str, str]:
    """Return a process's flags with redacted values, from the arguments after its module's name."""
    found: dict[str, str] = {}
    for index, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if not re.fullmatch(r"--[a-z-]{1,64}", flag):
            continue  # a value, or a flag of another program
        if not equals:
            following = arguments[index + 1] if index + 1 < len(arguments) else "--"
            value = "" if following.startswith("--") else following
        name = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
        text = shown(name, value) if value else "on" if not flag.startswith("--no-") else "off"
        found[flag] = f"{found[flag]} {text}" if flag in found else text
    return found


def shown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the redacted variables of Baton, OpenTelemetry and numeric libraries. Others are omitted, even by name."""
    found = {}
    for name, value in sorted(environment.items()):
        if _LIBRARY_VARIABLES.fullmatch(name):
            found[name] = _harmless(value)
        elif name.startswith(_NAMED_PREFIXES):
            found[name] = shown(name.removeprefix("BATON_").lower(), value)
    return found


def _address_of(url: str) -> str:
    """Return scheme, host and port of a URL; the rest may be secret."""
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
    """Removes known and likely secrets from texts, and writes `home` as `~`."""

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
    # Longest first: a shorter secret may be part of a longer one, whose rest would remain.
    by_length = sorted(found, key=lambda secret: (-len(secret), secret))
    return Redactor(tuple(by_length), str(home) if home is not None and len(home.parts) > 1 else None)


def _secrets_in(environment: Mapping[str, str]) -> Iterator[str]:
    for name, value in environment.items():
        if _SECRET_NAME.search(name) and not value.startswith("/"):
            # OTLP headers are lists of NAME=VALUE: each value is a secret.
            yield from (part for part in (value, *re.split(r"[\s,;=]+", value)) if len(part) >= 6)
        for user in _USER_IN_URL.findall(value):
            yield from (part for part in user.split(":") if len(part) >= 4)
