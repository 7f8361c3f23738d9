"""Code of the last release, extracted from the git history.

`pyproject.toml` names its version and commit (`tool.baton.last-release`).
"""

import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton import child_environment
from baton.kernels.native.build import BUILT
from baton.launch.paths import ROOT

RELEASES = ROOT / ".cache" / "releases"
GIT_S = 60.0
BUILD_S = 600.0


class ReleaseMissing(Exception):
    """Error: this clone of the repository lacks the code of a release. The message says what is missing."""


FORMER_MODULES = {"baton.router": "baton.gateway", "baton.elastic_worker": "baton.worker"}
"""Names of entry modules in release 0.1.0, by their names today."""


def command_of(code: Path, command: Sequence[str]) -> tuple[str, ...]:
    """Return `command` changed so that it starts the same process from another release's code, in folder `code`."""
    if (code / "baton" / "router" / "http").exists():
        return tuple(command)
    return tuple(FORMER_MODULES.get(each, each) for each in command)


def can_share_ports(code: Path) -> bool:
    """Return whether routers of the release in folder `code` know --share-ports, which 0.1.0 does not."""
    settings = code / "baton" / "router" / "config.py"
    return settings.exists() and "share_ports:" in settings.read_text()


@dataclass(frozen=True, slots=True)
class PastRelease:
    version: str
    commit: str


def last_release(root: Path = ROOT) -> PastRelease:
    """Return the last release, which pyproject.toml names. Raises: KeyError, OSError."""
    named = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["baton"]["last-release"]
    return PastRelease(named["version"], named["commit"])


def check_out(
    release: PastRelease, releases: Path = RELEASES, repository: Path = ROOT, has_native_kernels: bool = True
) -> Path:
    """Return the PYTHONPATH of the code of `release`, extracted on first use. Blocks. Raises: ReleaseMissing.

    `has_native_kernels`: add compiled kernels. They are copied from this tree if the sources are equal, else built,
    which takes most of a minute. False: the release computes with PyTorch.
    """
    folder = releases / (release.commit[:12] + ("" if has_native_kernels else "-pytorch"))
    if not folder.exists():
        releases.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=releases) as scratch:
            with tarfile.open(fileobj=io.BytesIO(_archive(release, repository))) as files:
                files.extractall(scratch, filter="data")
            if has_native_kernels:
                _take_kernels(Path(scratch))
            if not folder.exists():  # another process may have created it meanwhile
                Path(scratch).replace(folder)
                Path(scratch).mkdir()  # TemporaryDirectory needs a folder to remove
    return folder / "src"


def _archive(release: PastRelease, repository: Path) -> bytes:
    command = ["git", "-C", str(repository), "archive", "--format=tar", release.commit]
    try:
        done = subprocess.run(command, capture_output=True, timeout=GIT_S, check=False)
    except FileNotFoundError as error:
        raise ReleaseMissing(f"git is not on PATH; it is needed for the code of release {release.version}") from error
    if done.returncode:
        why = done.stderr.decode(errors="replace").strip()
        raise ReleaseMissing(
            f"commit {release.commit} of release {release.version} is not in this clone ({why}); "
            "a shallow clone gets it by: git fetch --unshallow"
        )
    return done.stdout


def _take_kernels(folder: Path) -> None:
    """Copy this tree's kernel libraries. If the digest in their names is not the release's, build the release's own."""
    built = folder / "kernels" / "native" / "built"
    built.mkdir(exist_ok=True)
    for library in BUILT.glob("*.so"):
        shutil.copy2(library, built)
    command = [sys.executable, "-P", "-m", "baton.kernels.native.build"]
    environment = {**child_environment(), "PYTHONPATH": str(folder / "src")}
    subprocess.run(command, env=environment, capture_output=True, timeout=BUILD_S, check=False)
