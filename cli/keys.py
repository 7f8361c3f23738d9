"""API keys, and certificates for development, created by the `openssl` program."""

import os
import subprocess
import tempfile
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path

from baton.launch import CommandFailed
from baton.process.objectives import NONE_REQUESTED, RequestedObjectives
from baton.process.private_files import FILE_MODE, write_private
from baton.process.security.api_keys import (
    ApiKey,
    KeyFormatError,
    KeyLimits,
    KeyRing,
    digest_of,
    new_secret,
    parse_key_file,
)
from baton.process.security.tls import INTERNAL_NAME

ALWAYS = ("localhost", "127.0.0.1", "::1")
_TIMEOUT_S = 30.0
_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc")


FILES = ("ca.pem", "server.pem", "server-key.pem", "internal-ca.pem", "internal.pem", "internal-key.pem")


def make_certificates(folder: Path, hosts: Sequence[str], days: int) -> None:
    """Create FILES, which must not exist, with separate CAs for public and internal ports. Raises: CommandFailed."""
    if present := [name for name in FILES if (folder / name).exists()]:
        raise CommandFailed(f"{folder / present[0]} exists; give another folder")
    public = tuple(_alternative(host) for host in dict.fromkeys((*ALWAYS, *hosts)))
    # The keys of the CAs stay in this private folder, which is deleted.
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        _make(work, "ca", "server", public, "serverAuth", days)
        _make(work, "internal-ca", "internal", (_alternative(INTERNAL_NAME),), "serverAuth,clientAuth", days)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name in FILES:
                _write(folder / name, (work / name).read_bytes(), 0o600 if name.endswith("-key.pem") else 0o644)
        except OSError as error:
            raise CommandFailed(f"{folder}: {error}") from error


def _make(folder: Path, authority: str, name: str, alternatives: Sequence[str], purposes: str, days: int) -> None:
    """Create a CA and its only certificate."""
    limited = ("-days", str(days), "-sha256")
    own = ("-keyout", f"{authority}-key.pem", "-out", f"{authority}.pem", "-subj", f"/CN=Baton {authority}")
    _openssl(folder, "req", "-x509", *_CURVE, *limited, *own, *_extensions("critical,CA:TRUE", "keyCertSign"))
    signed = ("-CA", f"{authority}.pem", "-CAkey", f"{authority}-key.pem")
    files = ("-keyout", f"{name}-key.pem", "-out", f"{name}.pem", "-subj", "/CN=baton")
    extensions = (*_extensions("critical,CA:FALSE", "digitalSignature"), "-addext", f"extendedKeyUsage={purposes}")
    extensions += ("-addext", f"subjectAltName={','.join(alternatives)}")
    _openssl(folder, "req", "-x509", *_CURVE, *limited, *files, *signed, *extensions)


def _extensions(constraints: str, usage: str) -> tuple[str, ...]:
    return ("-addext", f"basicConstraints={constraints}", "-addext", f"keyUsage=critical,{usage}")


def _alternative(host: str) -> str:
    """Return a host as a subject alternative name of a certificate. Raises: CommandFailed."""
    try:
        return f"IP:{ip_address(host)}"
    except ValueError:
        if not host or not all(character.isalnum() or character in ".-*" for character in host):
            raise CommandFailed(f"{host!r} is neither a name nor an address") from None
        return f"DNS:{host}"


def _openssl(folder: Path, *arguments: str) -> None:
    # Replaces the machine's own openssl.cnf, which may add the same extensions again.
    (folder / "openssl.cnf").write_text("[req]\ndistinguished_name = name\n[name]\n")
    environment = {**os.environ, "OPENSSL_CONF": str(folder / "openssl.cnf")}
    try:
        subprocess.run(
            ["openssl", *arguments], cwd=folder, env=environment, check=True, capture_output=True, timeout=_TIMEOUT_S
        )
    except FileNotFoundError:
        raise CommandFailed("openssl is not installed; install it to create certificates") from None
    except subprocess.TimeoutExpired:
        raise CommandFailed(f"openssl did not finish within {_TIMEOUT_S:g} s") from None
    except subprocess.CalledProcessError as error:
        raise CommandFailed(f"openssl: {error.stderr.decode(errors='replace').strip()[-500:]}") from error


def _write(path: Path, content: bytes, mode: int) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)


def append_key(
    file: Path, name: str, limits: KeyLimits, is_admin: bool, objectives: RequestedObjectives = NONE_REQUESTED
) -> str:
    """Append a new key's hash to a file atomically and return the key. Raises: CommandFailed."""
    secret = new_secret()
    key = ApiKey(name, digest_of(secret), limits, is_admin, objectives)
    try:
        before = file.read_text(encoding="utf-8") if file.exists() else ""
        KeyRing((*parse_key_file(before), *parse_key_file(key.line)))
        mode = file.stat().st_mode & 0o777 if file.exists() else FILE_MODE
        write_private(file, before + ("\n" if before and not before.endswith("\n") else "") + key.line + "\n")
        file.chmod(mode)
    except (KeyFormatError, OSError, UnicodeDecodeError) as error:
        raise CommandFailed(f"{file}: {error}") from error
    return secret
