"""Check of a batch's input file, in a helper process: parsing up to 200 MiB would block the router's event loop.

The accepted requests are written to a file, two lines each: the custom_id and the body. So the router reads them one by
one, and the input file may be deleted while the batch runs.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from pydantic_core import to_json

from baton.process.helper import Buffer, answer_frames
from baton.router.http.batches.lines import BOM, BatchRequest, LineRefused, read_line

MODULE = "baton.router.http.batches.check"
MAX_REQUESTS = 50_000
"""Maximum number of requests of a batch, as at OpenAI."""
CHECK_S = 300.0
"""Maximum time of a check, in seconds."""
_MAX_ERRORS = 100


@dataclass(slots=True)
class CheckedInput:
    """Result of a check. `model`: model that the first request names. `errors`: in OpenAI's format, the first 100."""

    total: int = 0
    model: str | None = None
    errors: list[Mapping[str, Any]] = field(default_factory=list)

    def refuse(self, code: str, message: str, line: int | None = None, param: str | None = None) -> None:
        if len(self.errors) < _MAX_ERRORS:
            self.errors.append({"code": code, "message": message, "line": line, "param": param})


def check(source: Path, target: Path, endpoint: str, max_line_bytes: int) -> CheckedInput:
    """Check the file `source`, and write its requests to `target`. Raises: OSError."""
    checked, seen = CheckedInput(), set[str]()
    with source.open("rb") as lines, target.open("wb") as requests:
        number = 0
        while line := lines.readline(max_line_bytes + 1):
            number += 1
            line = line.removeprefix(BOM) if number == 1 else line
            if len(line) > max_line_bytes:
                message = f"line {number} exceeds {max_line_bytes} bytes (--http-max-body of the router); shorten it"
                checked.refuse("line_too_long", message, number)
                break  # the rest of the line is no line
            if line.strip() and not _accept(line, number, endpoint, checked, seen, requests):
                break
    if not checked.total and not checked.errors:
        checked.refuse("empty_file", "the file has no requests; write one JSON object per line")
    return checked


def _accept(line: bytes, number: int, endpoint: str, checked: CheckedInput, seen: set[str], requests: BinaryIO) -> bool:
    """Check a line and write its request. Return False if no further line may be accepted."""
    custom_id, request = read_line(line, number, (endpoint,))
    if (fault := request.fault or _id_fault(custom_id, seen)) is not None or custom_id is None:
        checked.refuse("invalid_line", f"line {number}: {fault}", number, fault.param if fault is not None else None)
        return True
    if checked.total == MAX_REQUESTS:
        checked.refuse("too_many_requests", f"the file has more than {MAX_REQUESTS} requests; split it", number)
        return False
    seen.add(custom_id)
    checked.total += 1
    if checked.model is None:
        checked.model = _model(request)
    if not checked.errors:
        # NaN and Infinity are kept, since null would count as an absent field.
        requests.write(b"%b\n%b\n" % (to_json(custom_id), to_json(request.body, inf_nan_mode="constants")))
    return True


def _id_fault(custom_id: str | None, seen: set[str]) -> LineRefused | None:
    if custom_id is None:
        return LineRefused("custom_id: is missing; give each line its own", "custom_id")
    return LineRefused(f"custom_id: {custom_id[:64]!r} is used twice", "custom_id") if custom_id in seen else None


def _model(request: BatchRequest) -> str | None:
    model = request.body.get("model")
    return model if isinstance(model, str) else None


def question(source: Path, target: Path, endpoint: str, max_line_bytes: int) -> Sequence[Buffer]:
    """Return a question for the helper process."""
    return [json.dumps([str(source), str(target), endpoint, max_line_bytes]).encode()]


def answered(answer: Buffer) -> CheckedInput:
    """Parse an answer of the helper process."""
    return CheckedInput(**json.loads(bytes(answer)))


def _answer(asked: memoryview) -> Sequence[Buffer]:
    source, target, endpoint, max_line_bytes = json.loads(bytes(asked))
    try:
        checked = check(Path(source), Path(target), endpoint, max_line_bytes)
    except FileNotFoundError:
        checked = CheckedInput()
        checked.refuse("input_file_not_found", "the input file was deleted or has expired before it was read")
    return [to_json(checked)]


if __name__ == "__main__":
    sys.exit(answer_frames(_answer, cpu_s=CHECK_S))
