"""The files of the router that one request goes through, from the call of the service until its trace is written."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import baton.router
from tests.router.conftest import Stack, text_of

ROUTER = Path(baton.router.__file__).parent
VALUES = "types/"  # plain values are no stop on the way
LAST = "trace/spans.py"  # what follows serves the explanation of requests that have ended
MOST_FILES = 29


@contextmanager
def visited(files: dict[str, int]) -> Iterator[None]:
    """Counts the calls into each file, in the order of the first ones. Of this thread, the event loop's."""
    names: dict[str, str] = {}

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or LAST in files:
            return
        path = frame.f_code.co_filename
        if path not in names:
            inside = Path(path).is_relative_to(ROUTER)
            names[path] = str(Path(path).relative_to(ROUTER)) if inside else ""
        if (name := names[path]) and not name.startswith(VALUES):
            files[name] = files.get(name, 0) + 1

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


async def test_a_request_goes_through_few_files(stack: Stack) -> None:
    await stack.ready()
    await stack.generate("hello", max_tokens=4)  # what is imported, or made, once
    stack.prefill.silent = stack.decode.silent = True  # reports are no part of the request
    visits = list[dict[str, int]]()
    for text in ("hello again", "and again", "once more"):
        visits.append({})
        with visited(visits[-1]):
            responses = await stack.generate(text, max_tokens=4)
        assert len(text_of(responses)) == 4
    # What happened beside one of them by chance is no part of it.
    files = {name: calls for name, calls in visits[0].items() if all(name in others for others in visits)}
    listed = "\n".join(f"{calls:5} {name}" for name, calls in files.items())
    assert LAST in files and len(files) <= MOST_FILES, f"{len(files)} files:\n{listed}"
