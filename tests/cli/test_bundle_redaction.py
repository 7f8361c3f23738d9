"""Redaction of settings, texts and log lines in a bundle."""

import json
from pathlib import Path

import pytest

from baton.cli.bundle.command import safe_texts
from baton.cli.bundle.log_lines import safe_line, safe_lines, tail
from baton.cli.bundle.redaction import GIVEN, REDACTED, Redactor, redactor_for, shown, shown_flags, shown_variables
from baton.elastic_worker.config import ElasticConfig
from baton.process.security.api_keys import new_secret
from baton.router.config import RouterConfig

HIDDEN = {"api_keys", "api_key_hashes", "tls_cert", "tls_key"}
HIDDEN |= {"internal_tls_ca", "internal_tls_cert", "internal_tls_key", "secret", "secret_file"}


def test_setting_is_hidden_only_if_it_is_a_known_secret() -> None:
    fields = {**RouterConfig.fields, **ElasticConfig.fields}
    values = ("7", "decode@h:7", "https://h:7")
    assert {name for name in fields if all(shown(name, value) == GIVEN for value in values)} == HIDDEN


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("port", "50051", "50051"),
        ("kv_memory", "1.5GiB", "1.5GiB"),
        ("cores", "0,2-3", "0,2-3"),
        ("namespace", "a secret sentence", GIVEN),
        ("namespace", "http://a:b@c", "http://c"),
        ("workers", "prefill@h:1,decode@h:2", "prefill@h:1,decode@h:2"),
        ("workers", "me:secret@h:1", "h:1"),
        ("cors_origins", "https://a.example,http://b:3000", "https://a.example,http://b:3000"),
        ("cors_origins", "https://me:a,b@h", "https://h"),
        ("allowed_hosts", "a.example,*.b.example", "a.example,*.b.example"),
        ("redis_url", "rediss://me:pw@h:6379/0?password=pw", "rediss://h:6379"),
        ("otlp_endpoint", "h:4317", "h:4317"),
        ("redis_url", "redis://h:nine", GIVEN),
        ("adapter", "sql=/home/me/sql,chat=/x", "sql=/home/me/sql,chat=/x"),
        ("model", "/models/tiny", "/models/tiny"),
        ("unknown", "1", GIVEN),
    ],
)
def test_setting_is_shown_by_its_form(name: str, value: str, text: str) -> None:
    assert shown(name, value) == text


def test_shown_flags_reads_every_notation() -> None:
    arguments = ["--port", "1", "--no-graphs", "--insecure", "--api-keys=/k", "--adapter", "a=/x", "--adapter", "b=/y"]
    assert shown_flags([*arguments, "--a secret flag", "text"]) == {
        "--port": "1",
        "--no-graphs": "off",
        "--insecure": "on",
        "--api-keys": GIVEN,
        "--adapter": "a=/x b=/y",
    }


def test_shown_variables_leaves_out_names_of_other_programs() -> None:
    given = {"BATON_X_API_KEY": "k", "OTEL_FOO": "f", "HOME": "/h", "CUDA_VISIBLE_DEVICES": "0,1", "BATON_PORT": "2"}
    assert shown_variables(given) == {
        "BATON_PORT": "2",
        "BATON_X_API_KEY": GIVEN,
        "CUDA_VISIBLE_DEVICES": "0,1",
        "OTEL_FOO": GIVEN,
    }


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer SECRET1",
        "redis://user:SECRET1@host",
        '{"api_key": "SECRET1"}',
        "password=SECRET1",
        "x-api-key: SECRET1",
        "hf_SECRET1abcdefghij",
        "sk-SECRET1abcdefghijkl",
        "-----BEGIN PRIVATE KEY-----\nSECRET1\n-----END PRIVATE KEY-----",
        "known by its value: s3cr3t SECRET1",
    ],
)
def test_redactor_removes_known_and_likely_secrets(text: str) -> None:
    cleaned = Redactor(("s3cr3t SECRET1",)).clean(text)
    assert "SECRET1" not in cleaned and REDACTED in cleaned


def test_redactor_removes_api_keys_by_form() -> None:
    assert Redactor(()).clean(f"key {new_secret()} end") == f"key {REDACTED} end"


@pytest.mark.parametrize(
    "text",
    [
        '"pending_tokens": 128, "completion_tokens": 7',
        "vllm:prompt_tokens_total 7.0",
        "from token 301 on",
        "http://collector:4317 (OTLP, grpc)",
        "a" * 32,
    ],
)
def test_redactor_keeps_figures_and_ids(text: str) -> None:
    assert Redactor(()).clean(text) == text


def test_redactor_removes_parts_of_secret_variables_and_shortens_home() -> None:
    redactor = redactor_for(
        [{"X_HEADERS": "auth=first111,b=second22", "PROXY": "http://me:third333@p"}], Path("/home/mia")
    )
    cleaned = redactor.clean("first111 second22 third333 /home/mia/x /home/miami")
    assert cleaned == f"{REDACTED} {REDACTED} {REDACTED} ~/x /home/miami"


HEAD = "12:00:00.123 WARNING decode-0 baton"


@pytest.mark.parametrize(
    "line",
    [
        f"{HEAD}.router.fleet.link: link to worker 127.0.0.1:7 lost: silent for 3 s; its requests are retried",
        f"{HEAD}.elastic_worker.elastic: serves as decode: drained in 0.25 s, changed in 1.00 s trace_id=a1",
        "7:M 24 Nov 2026 12:00:00.123 * Ready to accept connections tcp",
        '  File "/x/y.py", line 3 in step',
        "Thread 0x00007f1 (most recent call first):",
        "Fatal Python error: Segmentation fault",
    ],
)
def test_safe_line_keeps_lines_of_known_form(line: str) -> None:
    assert safe_line(line) == line
    assert safe_line(f"decode-0  | {line}") == f"decode-0  | {line}"


def test_safe_line_of_up_leaves_out_quoted_text() -> None:
    line = "baton     | decode-0 was ended by SIGKILL; restarting it in 0.2 s"
    assert safe_line(line) == line
    assert safe_line("baton     | try chat 'my question'") == "baton     | try chat '…'"


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        (
            f"{HEAD}.router.fleet.link: connection to worker d closed: no 'x y' in \"z; reconnecting",
            "connection to worker d closed: no '…' in \"…\"",
        ),
        (f"{HEAD}.router.fleet.link: tell me a story", "[15 characters left out"),
        (f"{HEAD}.never.there: text", "[4 characters left out"),
        ("12:00:00.123 INFO router uvicorn.error: a text", "[6 characters left out"),
        ("builtins.ValueError: a text", "builtins.ValueError: [message left out]"),
    ],
)
def test_safe_line_keeps_only_known_parts(line: str, kept: str) -> None:
    found = safe_line(line)
    assert found is not None and kept in found
    assert not {"x y", "z", "story", "text"} & set(found.replace('"', "'").split("'")) and "a text" not in found


@pytest.mark.parametrize("line", ["tell me a story", "    raise ValueError(x)", "Note: buy milk", "Dear Exception: x"])
def test_safe_line_of_unknown_form_is_none(line: str) -> None:
    assert safe_line(line) is None


def test_safe_lines_counts_left_out_lines() -> None:
    lines = ["one", "two", "Fatal Python error: Aborted", "three"]
    assert list(safe_lines(lines)) == [
        "[2 lines of others left out]",
        "Fatal Python error: Aborted",
        "[1 line of others left out]",
    ]


def test_safe_line_of_json_keeps_known_fields_and_places() -> None:
    trace = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    f("my text")\nValueError: my text'
    entry = {
        "time": "2026-01-02T03:04:05.678+00:00",
        "level": "error",
        "process": "d",
        "logger": "baton.elastic_worker.elastic",
    }
    entry |= {"exception": trace, "more": "my text", "request_id": "my text"}
    entry["message"] = "decode-0: draining to change its role to prefill"
    kept = json.loads(safe_line(json.dumps(entry)) or "")
    assert kept["message"] == "decode-0: draining to change its role to prefill" and kept["time"] == entry["time"]
    assert kept["exception"].splitlines()[1:] == [
        '  File "a.py", line 1, in f',
        "[1 line of others left out]",
        "ValueError: [message left out]",
    ]
    assert "my text" not in json.dumps(kept)


def test_tail_begins_with_a_complete_line(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_text("first\nsecond\nthird\n")
    assert tail(file, 10_000) == ["first", "second", "third"]
    assert tail(file, 9) == ["third"]


def test_safe_texts_empties_texts_of_several_words() -> None:
    secret = "tell nobody"
    given = {"request_id": secret, "model": "tiny", "stalls": [{"causes": [{"culprit": secret, "detail": "9 tokens"}]}]}
    assert safe_texts(given | {"age_s": 1.5, "tbt": None}) == {
        "request_id": "", "model": "tiny", "stalls": [{"causes": [{"culprit": "", "detail": "9 tokens"}]}],
        "age_s": 1.5, "tbt": None,
    }  # fmt: skip
