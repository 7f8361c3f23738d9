"""Mutual TLS between our own processes: each shows a certificate of one authority, which signs for no others.

A holder of such a certificate may act as any process. Names carry no meaning: workers move between machines, so all
certificates are for one name. Data in CUDA IPC, NIXL, NCCL, Gloo and shared memory does not pass through TLS.

Servers read changed files at the next connection. A channel keeps the files from when it was opened; routers open
theirs anew with every session.
"""

from dataclasses import dataclass
from pathlib import Path

import grpc

from service.tls import TlsFiles, changing_credentials

INTERNAL_NAME = "baton-internal"

Options = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class InternalTls:
    """PEM files: of the authority, of this process's certificate, and its key."""

    authority: Path
    certificate: Path
    key: Path

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Of a server that talks only to our own. Raises: TlsError, OSError."""
        paths = (self.authority, self.certificate, self.key)
        return changing_credentials(paths, self._configuration, only_ours=True)

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        TlsFiles(self.certificate, self.key).check()
        pair = (self.key.read_bytes(), self.certificate.read_bytes())
        return grpc.ssl_server_certificate_configuration([pair], self.authority.read_bytes())

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Raises: OSError."""
        files = (self.authority, self.key, self.certificate)
        return grpc.ssl_channel_credentials(*(file.read_bytes() for file in files))


def open_channel(endpoint: str, options: Options, tls: InternalTls | None) -> grpc.Channel:
    """A blocking channel to one of our own. Raises: OSError."""
    if tls is None:
        return grpc.insecure_channel(endpoint, options)
    return grpc.secure_channel(endpoint, tls.channel_credentials(), _named(options))


def open_async_channel(endpoint: str, options: Options, tls: InternalTls | None) -> grpc.aio.Channel:
    """The same, for an event loop. Raises: OSError."""
    if tls is None:
        return grpc.aio.insecure_channel(endpoint, options)
    return grpc.aio.secure_channel(endpoint, tls.channel_credentials(), _named(options))


def _named(options: Options) -> tuple[tuple[str, int | str], ...]:
    return (*options, ("grpc.ssl_target_name_override", INTERNAL_NAME))
