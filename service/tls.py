"""TLS of the public ports: certificate and key of a server, as gRPC and as HTTP take them."""

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc


class TlsError(Exception):
    """Certificate or key cannot be read, or do not belong together."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. The first certificate is the server's own, the rest lead to one that clients trust."""

    certificate: Path
    key: Path

    def http_context(self) -> ssl.SSLContext:
        """Raises: TlsError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self.certificate, self.key, password=_no_password)
        except (OSError, ssl.SSLError) as error:
            raise TlsError(f"{self.certificate} and {self.key}: {error.strerror or error}") from error
        return context

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Raises: TlsError."""
        self.http_context()  # gRPC says of no file what is wrong with it
        return grpc.ssl_server_credentials([(self.key.read_bytes(), self.certificate.read_bytes())])


def _no_password() -> str:
    raise ValueError("a key with a password cannot be used")  # else OpenSSL would ask for it at the terminal
