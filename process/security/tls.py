"""TLS of the public ports, and mutual TLS between the processes of a cluster.

When the files change, servers use the new files for new connections; open connections continue. A channel always uses
the files' content at its creation; routers create a channel for every link.
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
    """Error: certificate or key cannot be read, or do not belong together."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of a server: its certificate chain, own certificate first, and its key."""

    certificate: Path
    key: Path

    def http_context(self) -> ssl.SSLContext:
        """Return the TLS context of the HTTP server. Raises: TlsError."""
        files = ChangingFiles((self.certificate, self.key), self._context, TlsError, "certificate and key for HTTP")
        context = self._context()

        def take_latest(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
            connection.context = files.latest()

        context.sni_callback = take_latest  # called at every handshake, with or without a server name
        return context

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Return the credentials of the gRPC server. Raises: TlsError."""
        return changing_credentials((self.certificate, self.key), self._configuration)

    def check(self) -> None:
        """Check the files, with a more specific error than gRPC's. Raises: TlsError."""
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

    `only_ours`: clients must present a certificate of the cluster's CA.
    """
    files = ChangingFiles(paths, make, TlsError, "certificate and key for gRPC")
    given = files.latest()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """Return the configuration for a new connection; None: unchanged."""
        nonlocal given
        before, given = given, files.latest()
        return None if given is before else given

    # typeshed omits None, gRPC's value for "unchanged"
    return grpc.dynamic_ssl_server_credentials(given, fetch, only_ours)  # type: ignore[arg-type]


def _no_password() -> str:
    raise ValueError("an encrypted private key is not supported")  # prevents a prompt at the terminal


INTERNAL_NAME = "baton-internal"


@dataclass(frozen=True, slots=True)
class InternalTls:
    """PEM files for mutual TLS: the cluster's CA, this process's certificate and its key.

    A process with such a certificate may act as any process of the cluster: all certificates have the same name, since
    workers move between machines. gRPC and TCP connections are encrypted; CUDA IPC, NIXL, NCCL, Gloo and shared memory
    are not.
    """

    authority: Path
    certificate: Path
    key: Path

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Return credentials of a server that accepts only processes of the cluster. Raises: TlsError, OSError."""
        paths = (self.authority, self.certificate, self.key)
        return changing_credentials(paths, self._configuration, only_ours=True)

    def check(self) -> None:
        """Check that the files can be read and belong together. Raises: TlsError."""
        self.contexts()

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        TlsFiles(self.certificate, self.key).check()
        pair = (self.key.read_bytes(), self.certificate.read_bytes())
        return grpc.ssl_server_certificate_configuration([pair], self.authority.read_bytes())

    def streams(self) -> "InternalStreams":
        """Return the object that wraps TCP connections in mutual TLS. Raises: TlsError."""
        return InternalStreams(self)

    def contexts(self) -> "TlsContexts":
        """Return TLS contexts for accepted and for outgoing TCP connections. Raises: TlsError."""
        return TlsContexts(self._context(ssl.PROTOCOL_TLS_SERVER), self._context(ssl.PROTOCOL_TLS_CLIENT))

    def _context(self, protocol: int) -> ssl.SSLContext:
        """Create a context that presents this process's certificate and requires one of the cluster's CA."""
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
        """Return the credentials of a client's channel. Raises: OSError."""
        files = (self.authority, self.key, self.certificate)
        return grpc.ssl_channel_credentials(*(file.read_bytes() for file in files))


class TlsContexts(NamedTuple):
    server: ssl.SSLContext
    client: ssl.SSLContext


class InternalStreams:
    """Mutual TLS for TCP connections, with the current content of the files. Any thread may call it."""

    def __init__(self, tls: InternalTls) -> None:
        """Read the files. Raises: TlsError."""
        files = (tls.authority, tls.certificate, tls.key)
        self._files = ChangingFiles(files, tls.contexts, TlsError, "certificate and key for KV over TCP")

    def accepted(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO) -> ssl.SSLObject:
        return self._files.latest().server.wrap_bio(incoming, outgoing, server_side=True)

    def connected(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO) -> ssl.SSLObject:
        """Create the TLS object of an outgoing connection. A refusal by the peer may appear only at the first read."""
        return self._files.latest().client.wrap_bio(incoming, outgoing, server_hostname=INTERNAL_NAME)


def open_channel(
    endpoint: str, options: Options, tls: InternalTls | None, secret: ClusterSecret | None = None
) -> grpc.Channel:
    """Open a blocking channel to a process of the cluster; both sides prove that they know `secret`. Raises:
    OSError.
    """
    if tls is None:
        channel = grpc.insecure_channel(endpoint, options)
    else:
        channel = grpc.secure_channel(endpoint, tls.channel_credentials(), _named(options))
    return channel if secret is None else grpc.intercept_channel(channel, ProvingInterceptor(secret, endpoint))


def open_async_channel(
    endpoint: str, options: Options, tls: InternalTls | None, secret: ClusterSecret | None = None
) -> grpc.aio.Channel:
    """Open a channel for the event loop, like `open_channel`. Streaming requests carry no proof. Raises: OSError."""
    proving = None if secret is None else async_proving_interceptors(secret, endpoint)
    if tls is not None:
        credentials = tls.channel_credentials()
        return grpc.aio.secure_channel(endpoint, credentials, _named(options), interceptors=proving)
    if proving is None:
        return grpc.aio.insecure_channel(endpoint, options)
    return grpc.aio.insecure_channel(endpoint, options, interceptors=proving)


def _named(options: Options) -> tuple[tuple[str, int | str], ...]:
    return (*options, ("grpc.ssl_target_name_override", INTERNAL_NAME))
