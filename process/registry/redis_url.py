"""Check of the configured Redis URL. Without the check, an invalid URL would look like a Redis that does not respond.

redis://:PASSWORD@host:6379/0
rediss://USER:PASSWORD@host:6380/0?ssl_ca_certs=/path/ca.pem      # TLS; without a file: the machine's CAs
"""

from pathlib import Path
from urllib.parse import parse_qs, urlsplit

REDIS_PORT = 6379
_TLS = "rediss"
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
"""Parameters that name a PEM file."""


def check_redis_url(url: str) -> None:
    """Check a URL. Raises: ValueError, whose message omits the URL, since it may contain a password."""
    parts = urlsplit(url)
    if not url.startswith(("redis://", "rediss://", "unix://")):
        raise ValueError("the address of Redis must begin with redis://, rediss:// (TLS) or unix://")
    if parts.scheme != "unix" and not parts.hostname:
        raise ValueError("the address of Redis has no host; write redis://HOST:PORT/0")
    try:
        _ = parts.port
    except ValueError as error:
        raise ValueError("the port of Redis must be a number up to 65535") from error
    for name, values in parse_qs(parts.query).items():
        if not name.startswith("ssl_"):
            continue
        if parts.scheme != _TLS:
            raise ValueError(f"{name} needs rediss://, as redis:// is not encrypted")
        if name in _FILES and not Path(values[-1]).is_file():
            raise ValueError(f"{name}: there is no file {values[-1]}")


def without_password(url: str) -> str:
    """Return the URL without its password, for display."""
    before, _, place = url.rpartition("@")
    return f"{before.partition('://')[0]}://{place}" if before else url
