"""TLS of the public ports, and mutual TLS between our own processes.

Servers read changed files for the next connection; connections that are open stay. A channel keeps the files from when
it was opened; routers open theirs anew with every session.
"""

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import grpc

from baton.process.security.changing_files import ChangingFiles
from baton.process.security.cluster_secret import ClusterSecret
from baton.process.security.proofs import ProvingInterceptor, async_proving_interceptors

Options = tuple[tuple[str, int], ...]


class TlsError(Exception):
    """Certificate or key cannot be read, or do not belong together."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. The first certificate is the server's own, the rest lead to one that clients trust."""

    certificate: Path
    key: Path

    def http_context(self) -> ssl.SSLContext:
        """Return the context of the HTTP server. Raises: TlsError."""
        files = ChangingFiles((self.certificate, self.key), self._context, TlsError, "certificate and key for HTTP")
        context = self._context()

        def take_latest(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
            connection.context = files.latest()

        context.sni_callback = take_latest  # called for every handshake, whether the client names a server or not
        return context

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Return the credentials of the gRPC server. Raises: TlsError."""
        return changing_credentials((self.certificate, self.key), self._configuration)

    def check(self) -> None:
        """Check the files with an error more specific than gRPC's. Raises: TlsError."""
        self._context()

    def _context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self.certificate, self.key, password=_no_password)
        except (OSError, ssl.SSLError) as error:
            raise TlsError(f"{self.certificate} and {self.key}: {error.strerror or error}") from error
        return context

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        self.check()
        return grpc.ssl_server_certificate_configuration([(self.key.read_bytes(), self.certificate.read_bytes())])


def changing_credentials(
    paths: tuple[Path, ...], make: Callable[[], grpc.ServerCertificateConfiguration], only_ours: bool = False
) -> grpc.ServerCredentials:
    """Create server credentials that call `make` again when the files change. Raises: TlsError, OSError.

    `only_ours`: clients show a certificate too.
    """
    files = ChangingFiles(paths, make, TlsError, "certificate and key for gRPC")
    given = files.latest()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """Return the configuration for a new connection. None: as before."""
        nonlocal given
        before, given = given, files.latest()
        return None if given is before else given

    # grpc's types leave out None, which its documentation has for "no change"
    return grpc.dynamic_ssl_server_credentials(given, fetch, only_ours)  # type: ignore[arg-type]


def _no_password() -> str:
    raise ValueError("an encrypted private key is not supported")  # else OpenSSL would ask for it at the terminal


INTERNAL_NAME = "baton-internal"


@dataclass(frozen=True, slots=True)
class InternalTls:
    """PEM files: of the authority, of this process's certificate, and its key.

    A holder of such a certificate may act as any of our processes. Names carry no meaning: workers move between
    machines, so all certificates are for one name. Data in CUDA IPC, NIXL, NCCL, Gloo and shared memory does not pass
    through TLS; that of gRPC and of TCP connections does.
    """

    authority: Path
    certificate: Path
    key: Path

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Return credentials of a server that talks only to the cluster. Raises: TlsError, OSError."""
        paths = (self.authority, self.certificate, self.key)
        return changing_credentials(paths, self._configuration, only_ours=True)

    def check(self) -> None:
        """Check the files. Raises: TlsError."""
        self.contexts()

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        TlsFiles(self.certificate, self.key).check()
        pair = (self.key.read_bytes(), self.certificate.read_bytes())
        return grpc.ssl_server_certificate_configuration([pair], self.authority.read_bytes())

    def streams(self) -> "InternalStreams":
        """Return wrappers for TCP connections. Raises: TlsError."""
        return InternalStreams(self)

    def contexts(self) -> "TlsContexts":
        """Return contexts for TCP connections. Raises: TlsError."""
        return TlsContexts(self._context(ssl.PROTOCOL_TLS_SERVER), self._context(ssl.PROTOCOL_TLS_CLIENT))

    def _context(self, protocol: int) -> ssl.SSLContext:
        """Create a context that presents our certificate and requires one of our authority."""
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(self.certificate, self.key, password=_no_password)
            context.load_verify_locations(self.authority)
        except (OSError, ssl.SSLError) as error:
            raise TlsError(f"{self.authority}, {self.certificate} and {self.key}: {error.strerror or error}") from error
        return context

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return credentials of a channel. Raises: OSError."""
        files = (self.authority, self.key, self.certificate)
        return grpc.ssl_channel_credentials(*(file.read_bytes() for file in files))


class TlsContexts(NamedTuple):
    server: ssl.SSLContext
    client: ssl.SSLContext


class InternalStreams:
    """Mutual TLS on streams of bytes, with the files as they are at the time. Any thread."""

    def __init__(self, tls: InternalTls) -> None:
        """Read the files. Raises: TlsError."""
        files = (tls.authority, tls.certificate, tls.key)
        self._files = ChangingFiles(files, tls.contexts, TlsError, "certificate and key for KV over TCP")

    def accepted(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO) -> ssl.SSLObject:
        return self._files.latest().server.wrap_bio(incoming, outgoing, server_side=True)

    def connected(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO) -> ssl.SSLObject:
        """Create the TLS object of a connection. A refusal by the peer may appear only at the first read."""
        return self._files.latest().client.wrap_bio(incoming, outgoing, server_hostname=INTERNAL_NAME)


def open_channel(
    endpoint: str, options: Options, tls: InternalTls | None, secret: ClusterSecret | None = None
) -> grpc.Channel:
    """A blocking channel to one of our own, over which both sides prove that they know `secret`. Raises: OSError."""
    if tls is None:
        channel = grpc.insecure_channel(endpoint, options)
    else:
        channel = grpc.secure_channel(endpoint, tls.channel_credentials(), _named(options))
    return channel if secret is None else grpc.intercept_channel(channel, ProvingInterceptor(secret, endpoint))


def open_async_channel(
    endpoint: str, options: Options, tls: InternalTls | None, secret: ClusterSecret | None = None
) -> grpc.aio.Channel:
    """The same, for an event loop. Calls with several requests prove nothing by themselves. Raises: OSError."""
    proving = None if secret is None else async_proving_interceptors(secret, endpoint)
    if tls is not None:
        credentials = tls.channel_credentials()
        return grpc.aio.secure_channel(endpoint, credentials, _named(options), interceptors=proving)
    if proving is None:
        return grpc.aio.insecure_channel(endpoint, options)
    return grpc.aio.insecure_channel(endpoint, options, interceptors=proving)


def _named(options: Options) -> tuple[tuple[str, int | str], ...]:
    return (*options, ("grpc.ssl_target_name_override", INTERNAL_NAME))
