"""Whatever reading a foreign file raises is one printable refusal that names the file."""

import os
from pathlib import Path

import pytest

from baton.text.host.files import MESSAGE_CHARACTERS, FileRefused, read_json, reading, reads


class Refused(FileRefused):
    """Of these tests."""


class PanicException(BaseException):
    """Named as the one that libraries in Rust raise."""


@pytest.mark.parametrize(
    "fault",
    [RecursionError(), MemoryError(), OverflowError("x"), KeyError("a"), OSError(5, "no"), PanicException("rust")],
)
def test_reading_turns_any_fault_into_a_refusal_that_names_the_file(fault: BaseException) -> None:
    with pytest.raises(Refused, match=r"^/models/a/config\.json: "), reading(Path("/models/a/config.json"), Refused):
        raise fault


@pytest.mark.parametrize("passing", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_reading_lets_the_end_of_the_process_pass(passing: type[BaseException]) -> None:
    with pytest.raises(passing), reading(Path("a.json"), Refused):
        raise passing


def test_refusal_without_a_name_gets_one_and_one_with_a_name_stays(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=f"^{tmp_path}: no tensor$"), reading(tmp_path, Refused):
        raise Refused("no tensor")
    with pytest.raises(Refused, match=r"^config\.json: r is 0$"), reading(tmp_path / "config.json", Refused):
        raise FileRefused("config.json: r is 0")
    other = tmp_path / "tokenizer.json"
    with pytest.raises(Refused, match=f"^{other}: no$"), reading(tmp_path / "config.json", Refused):
        raise Refused(f"{other}: no")


def test_refusals_are_one_printable_line_of_bounded_length() -> None:
    assert str(FileRefused("a\ud800\x1b[31m\nb")) == "a\\ud800\\x1b[31m b"
    assert len(str(FileRefused("x" * 10**6))) == MESSAGE_CHARACTERS


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a":' * 70 + b"1" + b"}" * 70, "nested deeper than 64 levels"),
        (b"[]", "not a JSON object"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"1" * 5000, "not valid JSON"),
    ],
    ids=["unclosed", "deep", "array", "encoding", "digits"],
)
def test_read_json_rejects_anything_but_a_bounded_object(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(Refused, match=rf"config\.json: {reason}"):
        read_json(path, Refused, dict)


def test_pipe_or_device_in_a_folder_is_rejected_before_opening(tmp_path: Path) -> None:
    @reads(Refused)
    def read(folder: Path) -> str:
        return "read"

    assert read(tmp_path) == "read"
    (tmp_path / "model.safetensors").symlink_to("/dev/zero")
    with pytest.raises(Refused, match=r"model\.safetensors: not a regular file"):
        read(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(Refused, match=r"tokenizer\.json: not a regular file"):
        read(tmp_path)
