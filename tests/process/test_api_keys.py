"""API keys at rest: what a file may say, and who is found by a key."""

import json

import pytest

from baton.process.objectives import RequestedObjectives
from baton.process.security.api_keys import (
    ApiKey,
    KeyFormatError,
    KeyLimits,
    KeyRing,
    digest_of,
    new_secret,
    parse_key_file,
    parse_key_hashes,
)

HASH = "ab" * 32


def key(name: str, secret: str) -> ApiKey:
    return ApiKey(name, digest_of(secret))


def test_key_line_round_trips() -> None:
    limits = KeyLimits(requests_per_minute=60, tokens_per_minute=9000, concurrency=4, max_context_tokens=512)
    objectives = RequestedObjectives(ttft_slo_ms=900.5, tbt_slo_ms=20)
    for written in (
        ApiKey("alice", b"a" * 32, limits, is_admin=True, objectives=objectives),
        ApiKey("b.o-b_1", b"b" * 32),
    ):
        assert parse_key_file(f"# keys\n\n{written.line}\n") == (written,)


def test_each_key_is_found_by_its_secret_alone() -> None:
    secrets = [new_secret() for _ in range(50)]
    ring = KeyRing(key(f"n{number}", secret) for number, secret in enumerate(secrets))
    assert [found.name for secret in secrets if (found := ring.find(secret))] == [f"n{i}" for i in range(50)]
    for wrong in ("", secrets[0][:-1], secrets[0] + "x", digest_of(secrets[0]).hex(), "\ud800", "n0"):
        assert ring.find(wrong) is None


def test_every_search_compares_all_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(one)
        return one == other

    monkeypatch.setattr("hmac.compare_digest", compare)
    ring = KeyRing(key(f"n{number}", f"s{number}") for number in range(9))
    for secret in ("s0", "s8", "none"):
        ring.find(secret)
    assert len(compared) == 27


def test_secrets_have_256_random_bits() -> None:
    drawn = {new_secret() for _ in range(100)}
    assert len(drawn) == 100
    assert all(len(secret.removeprefix("baton-")) == 43 for secret in drawn)  # of 6 bits each


def test_salts_differ_by_key_and_name_and_are_no_hash_of_the_file() -> None:
    salts = {key(name, secret).key_salt for name in "ab" for secret in "xy"}
    assert len(salts) == 4
    assert not salts & {digest_of("x"), digest_of("y")}
    assert key("a", "x").key_salt == key("a", "x").key_salt


@pytest.mark.parametrize(
    "line",
    [
        {"name": "a"},
        {"name": "a", "sha256": "SECRET"},
        {"name": "a", "sha256": HASH.upper()},
        {"name": "a b", "sha256": HASH},
        {"name": "", "sha256": HASH},
        {"name": "a", "sha256": HASH, "key": "SECRET"},
        {"name": "a", "sha256": HASH, "concurrency": 0},
        {"name": "a", "sha256": HASH, "concurrency": True},
        {"name": "a", "sha256": HASH, "tokens_per_minute": "9"},
        {"name": "a", "sha256": HASH, "ttft_slo_ms": 0.5},
        {"name": "a", "sha256": HASH, "tbt_slo_ms": True},
        {"name": "a", "sha256": HASH, "tbt_slo_ms": float("nan")},
        {"name": "a", "sha256": HASH, "admin": "SECRET"},
        ["SECRET"],
    ],
)
def test_bad_line_is_named_by_number_and_not_quoted(line: object) -> None:
    with pytest.raises(KeyFormatError, match="line 2") as refused:
        parse_key_file(f"# SECRET\n{json.dumps(line)}")
    assert "SECRET" not in str(refused.value)


def test_malformed_json_is_not_quoted() -> None:
    with pytest.raises(KeyFormatError, match="line 1: not JSON") as refused:
        parse_key_file("baton-SECRET")
    assert refused.value.__cause__ is None and "SECRET" not in str(refused.value)


def test_two_keys_never_share_a_name_or_a_hash() -> None:
    for other in (key("a", "y"), key("b", "x")):
        with pytest.raises(KeyFormatError, match="the same"):
            KeyRing((key("a", "x"), other))


def test_hashes_of_the_environment_have_names() -> None:
    assert parse_key_hashes(f"a:{HASH}, b:{'cd' * 32}") == (ApiKey("a", b"\xab" * 32), ApiKey("b", b"\xcd" * 32))
    assert parse_key_hashes("") == ()
    with pytest.raises(KeyFormatError, match="key 2"):
        parse_key_hashes(f"a:{HASH},SECRET")
