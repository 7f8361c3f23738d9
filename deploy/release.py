"""Start the next version of this repository: `.venv/bin/python deploy/release.py VERSION`.

The current version becomes the last release, at the checked-out commit; tests roll clusters between it and the next.
Every file that states the version gets the next one. In CHANGELOG.md the unreleased changes get the heading of the
current version.
"""

import datetime
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GIT_S = 30
_VERSION = r"(\d+)\.(\d+)\.(\d+)"
UNRELEASED = "## [Unreleased]\n"
PLACES: Mapping[str, tuple[str, ...]] = {
    "pyproject.toml": ('version = "{}"\ndescription', '"baton-client=={}"'),
    "deploy/packaging/client/pyproject.toml": ('version = "{}"\ndescription',),
    "deploy/packaging/lab/pyproject.toml": ('version = "{}"\ndescription', '"baton-serve=={}"'),
    "src/baton/versions.py": ('RELEASE = "{}"\n',),
    "Dockerfile": ("ARG VERSION={}\n",),
}
"""Texts that contain the version, by file."""


def current(root: Path = ROOT) -> str:
    version: str = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    return version


def begin(root: Path, following: str, commit: str, today: datetime.date) -> None:
    """Rewrite the files. Raises: ValueError, before any is written."""
    before = current(root)
    if re.fullmatch(_VERSION, following) is None or _numbers(following) <= _numbers(before):
        raise ValueError(f"{following!r} is no version after {before}; give three numbers such as 1.2.3")
    written = {root / name: _with(root, name, texts, before, following) for name, texts in PLACES.items()}
    project = root / "pyproject.toml"
    written[project] = re.sub(
        r"(?<=\[tool\.baton\.last-release\]\n)version = .*\ncommit = .*\n",
        f'version = "{before}"\ncommit = "{commit}"\n',
        written[project],
    )
    changelog = root / "CHANGELOG.md"
    text = changelog.read_text()
    if UNRELEASED not in text:
        raise ValueError(f"CHANGELOG.md has no heading {UNRELEASED.strip()!r}")
    heading = f"{UNRELEASED}\n## [{before}] - {today.isoformat()}\n"
    written[changelog] = text.replace(UNRELEASED, heading, 1)
    for path, text in written.items():
        path.write_text(text)


def _with(root: Path, name: str, texts: tuple[str, ...], before: str, following: str) -> str:
    content = (root / name).read_text()
    for text in texts:
        if content.count(text.format(before)) != 1:
            raise ValueError(
                f"{name}: {text.format(before)!r} occurs {content.count(text.format(before))} times, must occur once"
            )
        content = content.replace(text.format(before), text.format(following))
    return content


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    commit = subprocess.run(command, check=True, timeout=GIT_S, capture_output=True, text=True).stdout.strip()
    try:
        begin(ROOT, sys.argv[1], commit, datetime.datetime.now(datetime.UTC).date())  # noqa: TID251 -- date of a heading
    except ValueError as error:
        raise SystemExit(f"release.py: {error}") from error


if __name__ == "__main__":
    main()
