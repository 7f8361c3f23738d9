"""Access to the played cluster: open, or with an API key, TLS and certificates generated for one run."""

import ssl
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx2

from baton.cli.keys import make_certificates
from baton.client import AsyncBatonClient
from tests.deploy.play.podman import ADDRESSES

SECURE = ("api-keys", "public-tls", "internal-tls")
"""Components that are run together."""
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Entry:
    components: tuple[str, ...] = ()
    secrets: Mapping[str, Path] = field(default_factory=dict)
    """Folders by the name of the secret."""
    api_key: str | None = field(default=None, repr=False)
    authority: Path | None = None

    def address(self, router: str, path: str) -> str:
        """Return a URL. `router`: HTTP host:port."""
        return f"{'https' if self.authority else 'http'}://{router}{path}"

    def http(self) -> httpx2.AsyncClient:
        verify = ssl.create_default_context(cafile=self.authority) if self.authority else True
        headers = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return httpx2.AsyncClient(timeout=TIMEOUT_S, verify=verify, headers=headers)

    def grpc(self, target: str) -> AsyncBatonClient:
        return AsyncBatonClient(target, timeout_s=TIMEOUT_S, api_key=self.api_key, tls=self.authority or False)


def secure_entry(folder: Path) -> Entry:
    """Generate keys and certificates in `folder`, with the file names of docs/kubernetes.md."""
    made = folder / "made"
    make_certificates(made, ("baton-grpc", *ADDRESSES), days=1)
    secrets = {
        "baton-public-tls": {"tls.crt": "server.pem", "tls.key": "server-key.pem"},
        "baton-internal-tls": {
            "ca.crt": "internal-ca.pem",
            "tls.crt": "internal.pem",
            "tls.key": "internal-key.pem",
        },
        "baton-api-keys": {"keys": "keys"},
    }
    command = [sys.executable, "-m", "baton.cli", "keys", "new", "play", "--admin", "--file", str(made / "keys")]
    key = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    for name, files in secrets.items():
        (folder / name).mkdir()
        for inside, file in files.items():
            (folder / name / inside).write_bytes((made / file).read_bytes())
            (folder / name / inside).chmod(0o644)  # the pods' user is another one
    folder.chmod(0o755)
    return Entry(SECURE, {name: folder / name for name in secrets}, key, made / "ca.pem")
