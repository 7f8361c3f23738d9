"""The release and protocol that a process announces, and whether two processes may work together. Pure.

`docs/releases.md` says when PROTOCOL is raised. Every folder may import this module, which needs no library.
"""

from dataclasses import dataclass

RELEASE = "0.2.0"
"""The same as in pyproject.toml and deploy/packaging/client/pyproject.toml, whose wheels have it as their version."""
PROTOCOL = 2
"""Of the messages between routers and workers, and between workers (`protos/`)."""
POOLING_PROTOCOL = 2
"""The first in which a worker can be asked for a vector of a prompt (`Prefill.pooling`, `Start.pooling`)."""
OLDEST_PROTOCOL = 1
"""The oldest protocol that this release speaks with others."""
UNANNOUNCED_RELEASE = "before 0.2.0"
"""For people, of a release that announces none."""
_FIRST_PROTOCOL = 1


@dataclass(frozen=True, slots=True)
class Versions:
    """Of one process. It speaks every protocol from `oldest_protocol` to `protocol`."""

    release: str  # empty: a release that announces none
    protocol: int
    oldest_protocol: int

    def __str__(self) -> str:
        release = f"release {self.release}" if self.release else f"a release {UNANNOUNCED_RELEASE}"
        older = f", oldest {self.oldest_protocol}" if self.oldest_protocol != self.protocol else ""
        return f"{release} (protocol {self.protocol}{older})"


OWN = Versions(RELEASE, PROTOCOL, OLDEST_PROTOCOL)


def announced(release: str = "", protocol: int = 0, oldest_protocol: int = 0) -> Versions:
    """As a message or a record has them. Releases before 0.2.0 announce none, which is empty and 0."""
    return Versions(release, protocol or _FIRST_PROTOCOL, oldest_protocol or protocol or _FIRST_PROTOCOL)


UNANNOUNCED = announced()


def refusal(mine: Versions, theirs: Versions) -> str:
    """Why the two must not work together, naming both; empty where they speak a protocol in common."""
    if mine.oldest_protocol <= theirs.protocol and theirs.oldest_protocol <= mine.protocol:
        return ""
    return f"no protocol in common: {mine} here, {theirs} there"


def differing(mine: str, theirs: str) -> tuple[str, str]:
    """Of two descriptions, which are words with spaces between them, the words that only one of them has."""
    own, other = mine.split(), theirs.split()
    return (
        " ".join(word for word in own if word not in other) or "nothing more",
        " ".join(word for word in other if word not in own) or "nothing more",
    )
