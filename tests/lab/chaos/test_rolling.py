"""Checkout of the last release from the history, and when a rolling upgrade counts as clean."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from baton import IMPORT_PATH
from baton.lab.chaos.checker import Finding, FindingKind
from baton.lab.chaos.history import Behaviour, ObservedAttempt, StreamHistory, StreamPiece
from baton.lab.chaos.rolling.checkout import PastRelease, ReleaseMissing, can_share_ports, check_out, last_release
from baton.lab.chaos.rolling.roll import Mixture, Rolled, RollingOptions, RollingOutcome, public_addresses
from baton.lab.chaos.stack import Layout, ProcessPlace

GIT_S = 30


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Repository with one commit, of a package without native kernels."""
    folder = tmp_path / "repository"
    (folder / "src" / "baton").mkdir(parents=True)
    (folder / "src" / "baton" / "__init__.py").write_text("RELEASE = 'old'\n")
    (folder / "kernels" / "native").mkdir(parents=True)
    (folder / "kernels" / "native" / "sources").write_text("none\n")
    identity = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
    for command in (("init", "-q"), ("add", "."), (*identity, "commit", "-q", "-m", "all of it")):
        subprocess.run(["git", "-C", str(folder), *command], check=True, timeout=GIT_S)
    return folder


def head(repository: Path) -> str:
    command = ["git", "-C", str(repository), "rev-parse", "HEAD"]
    return subprocess.run(command, check=True, timeout=GIT_S, capture_output=True, text=True).stdout.strip()


def test_code_of_a_commit_is_extracted_once(repository: Path, tmp_path: Path) -> None:
    release = PastRelease("0.0.1", head(repository))
    (repository / "src" / "baton" / "__init__.py").write_text("RELEASE = 'new'\n")
    code = check_out(release, tmp_path / "releases", repository)
    assert (code / "baton" / "__init__.py").read_text() == "RELEASE = 'old'\n"
    assert check_out(release, tmp_path / "releases", tmp_path / "nowhere") == code


def test_clone_without_that_commit_says_how_to_get_it(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(ReleaseMissing, match=r"commit 0{40} of release 0\.0\.1 .* git fetch --unshallow"):
        check_out(PastRelease("0.0.1", "0" * 40), tmp_path / "releases", repository)
    assert not list((tmp_path / "releases").iterdir())


def test_last_release_has_a_whole_commit_id() -> None:
    assert len(last_release().commit) == 40


def test_release_can_share_ports_only_if_its_routers_know_the_setting(tmp_path: Path) -> None:
    settings = tmp_path / "baton" / "router" / "config.py"
    settings.parent.mkdir(parents=True)
    assert not can_share_ports(tmp_path)
    settings.write_text("class RouterConfig:\n    port: int = 50051\n")
    assert not can_share_ports(tmp_path)
    assert can_share_ports(IMPORT_PATH)


def test_layout_with_a_number_of_routers_has_them_on_one_port() -> None:
    assert Layout.with_routers(4) == Layout(routers=4, shares_ports=True)
    assert Layout.with_routers(None) == Layout(routers=2, shares_ports=False)


@pytest.mark.parametrize(
    ("ports", "addresses"),
    [((7000, 7000, 7000), ["127.0.0.1:7000"]), ((7000, 7001), ["127.0.0.1:7000", "127.0.0.1:7001"])],
)
def test_clients_know_each_port_of_the_routers_once(ports: tuple[int, ...], addresses: list[str]) -> None:
    places = [ProcessPlace(f"router-{number}", port, f"127.0.1.{20 + number}") for number, port in enumerate(ports)]
    assert list(public_addresses(places)) == addresses


def stream(number: int, began_s: float, times: tuple[float, ...] = (), attempts: int = 1) -> StreamHistory:
    history = StreamHistory(number, "greedy 0", Behaviour.READS, "r", began_s)
    history.pieces = [StreamPiece(at_s, 0, offset, (1,), "") for offset, at_s in enumerate(times)]
    history.attempts = [
        ObservedAttempt("prefill-0", "decode-0", "lost" if at < attempts - 1 else "") for at in range(attempts)
    ]
    return history


CLEAN = RollingOutcome(
    RollingOptions(),
    "0.1.0",
    "0.2.0",
    [Rolled("decode-0", "0.2.0", 10.0, 20.0)],
    [Mixture("0.2.0", "0.1.0", "0.1.0", 20.0, 23.0)],
    [stream(0, 9.0, (9.5, 10.5, 19.0, 21.0, 30.0), attempts=2), stream(1, 21.0)],
)


def test_roll_is_clean_if_every_mix_handed_kv_over_and_all_tokens_are_right() -> None:
    assert CLEAN.is_good and CLEAN.went_on_elsewhere == 1
    assert replace(CLEAN, findings=[Finding(0, FindingKind.CLOSE, 0, 3, "as good")]).is_good


@pytest.mark.parametrize(
    "change",
    [
        {"rolled": []},
        {"histories": CLEAN.histories[:1]},
        {"histories": [stream(1, 21.0, attempts=0)]},
        {"findings": [Finding(0, FindingKind.LOST, 0, 3, "one token")]},
        {"unclean": ["decode-0 ended with exit code 1"]},
    ],
    ids=["nothing rolled", "no stream in a mixture", "none handed over", "a lost token", "an unclean end"],
)
def test_it_is_not_clean(change: dict[str, list[object]]) -> None:
    assert not replace(CLEAN, **change).is_good  # type: ignore[arg-type]


def test_longest_pause_is_of_the_time_in_which_the_process_was_rolled() -> None:
    assert CLEAN.longest_pause_s(CLEAN.rolled[0]) == 8.5


def test_streams_that_were_open_when_a_process_was_ended_are_counted() -> None:
    open_one, over = stream(0, 9.0), stream(1, 8.0)
    open_one.closed_s, over.closed_s = 12.0, 9.0
    assert replace(CLEAN, histories=[open_one, over, stream(2, 11.0)]).open_at(CLEAN.rolled[0]) == 1
