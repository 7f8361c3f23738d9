"""A new API key: its hash into a file, the key itself to the caller."""

import os
from pathlib import Path

from cli.errors import CommandFailed
from service.api_keys import ApiKey, KeyFormatError, KeyLimits, KeyRing, digest_of, new_secret, parse_key_file


def append_key(file: Path, name: str, limits: KeyLimits, is_admin: bool) -> str:
    """The key. The file is replaced in one step: a router sees it as it was or as it is. Raises: CommandFailed."""
    secret = new_secret()
    key = ApiKey(name, digest_of(secret), limits, is_admin)
    try:
        before = file.read_text(encoding="utf-8") if file.exists() else ""
        KeyRing((*parse_key_file(before), *parse_key_file(key.line)))
        after = before + ("\n" if before and not before.endswith("\n") else "") + key.line + "\n"
        _replace(file, after)
    except (KeyFormatError, OSError, UnicodeDecodeError) as error:
        raise CommandFailed(f"{file}: {error}") from error
    return secret


def _replace(file: Path, text: str) -> None:
    """Readable by its owner alone, unless it was by others before."""
    mode = file.stat().st_mode & 0o777 if file.exists() else 0o600
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as written:
            written.write(text)
            written.flush()
            os.fsync(descriptor)
        beside.chmod(mode)
        beside.replace(file)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
