"""How commands authenticate. A key never is a flag: all users of a machine can read the flags of a process."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

import grpc

from cli.errors import CommandFailed
from client.channel import Security
from service.config import ConfigError, InternalTlsConfig, read_config
from service.internal_tls import open_async_channel

API_KEY_VARIABLE = "BATON_API_KEY"
TLS_CA_VARIABLE = "BATON_TLS_CA"


class Credentials(TypedDict):
    """Keyword arguments of a client."""

    api_key: str | None
    tls: bool | Path


def credentials() -> Credentials:
    """From the environment. Raises: CommandFailed."""
    authority = os.environ.get(TLS_CA_VARIABLE)
    if authority and not Path(authority).is_file():
        raise CommandFailed(f"{TLS_CA_VARIABLE} is {authority}, which is no file")
    return Credentials(api_key=os.environ.get(API_KEY_VARIABLE) or None, tls=Path(authority) if authority else False)


def way_in(authority: Path | None, internal: bool) -> Callable[[str], grpc.aio.Channel] | None:
    """To a public port with TLS, or, by the variables of router and workers, to one of theirs; None: no TLS.

    Raises: CommandFailed.
    """
    if internal:
        try:
            tls = read_config(InternalTlsConfig, []).internal_tls
        except ConfigError as error:
            raise CommandFailed(str(error)) from error
        return lambda target: open_async_channel(target, (), tls)
    trusted = Security(tls=authority or False).credentials()
    return None if trusted is None else lambda target: grpc.aio.secure_channel(target, trusted)
