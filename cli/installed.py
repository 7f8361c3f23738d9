"""Installed release, protocol, commit, native kernels and libraries, without importing the libraries."""

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from baton.launch.paths import ROOT
from baton.versions import OWN

COMMAND_S = 10.0
REVISION_FILE = "REVISION"  # file in a container image, with the commit that it was built from


@dataclass(frozen=True, slots=True)
class Installed:
    release: str
    protocol: int
    oldest_protocol: int
    commit: str | None  # None if unknown
    changed_files: int | None  # files changed since the commit; None if unknown
    native_kernels: tuple[str, ...]  # instruction sets of native kernels; empty if PyTorch computes
    packages: Mapping[str, str | None]  # version by package; None if not installed


def installed(packages: Sequence[str], root: Path = ROOT) -> Installed:
    git = ["git", "-C", str(root)] if (root / ".git").exists() else None
    changed = None if git is None else output_of([*git, "status", "--porcelain", "--untracked-files=no"])
    built = (root / "kernels" / "native" / "built").glob("kernels-*.so")
    return Installed(
        OWN.release,
        OWN.protocol,
        OWN.oldest_protocol,
        _revision(root) if git is None else (output_of([*git, "rev-parse", "HEAD"]) or "").strip() or None,
        None if changed is None else len(changed.splitlines()),
        tuple(sorted(path.stem.split("-")[1] for path in built)),
        {name: _version_of(name) for name in packages},
    )


def lines(found: Installed) -> list[str]:
    """Format the installation as lines for people."""
    changed = f", {found.changed_files} files changed since" if found.changed_files else ""
    return [
        f"Baton {found.release}, protocol {found.protocol} (oldest {found.oldest_protocol})",
        f"commit {found.commit or '(unknown)'}{changed}",
        f"native kernels {', '.join(found.native_kernels) or '(not built: PyTorch computes)'}",
        *(f"{name} {version or '(not installed)'}" for name, version in found.packages.items()),
    ]


def output_of(command: Sequence[str]) -> str | None:
    """Return the output of a command, None if it is missing, fails or times out."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _revision(root: Path) -> str | None:
    try:
        return (root / REVISION_FILE).read_text().strip() or None
    except OSError:
        return None


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
