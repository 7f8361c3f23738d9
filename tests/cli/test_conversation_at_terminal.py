"""`baton chat` at a real terminal: what Ctrl-C and Ctrl-D do there."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from tests.client.conftest import Events, FakeBaton, serving
from tests.fixtures.terminal import WAIT_S, Terminal


@pytest.fixture
def baton() -> Iterator[FakeBaton]:
    fake = FakeBaton([])
    with serving(fake):
        yield fake


def test_chat_at_terminal_ctrl_c_cancels_and_ctrl_d_ends(baton: FakeBaton) -> None:
    events = Events()

    def endless(request: Any, context: grpc.ServicerContext) -> Any:
        yield events.started()
        yield events.delta(0, [5], "never ")
        baton.ended.wait(timeout=WAIT_S)

    def whole(request: Any, context: grpc.ServicerContext) -> Any:
        yield from (events.started(), events.delta(0, [5], "done"), events.finished())

    baton.answers = [endless, whole]
    terminal = Terminal("chat", "--target", baton.target)
    try:
        terminal.wait_for("> ")
        terminal.type("one\n")
        terminal.wait_for("never ")
        terminal.type("\x03")
        terminal.wait_for("(cancelled)")
        assert baton.ended.wait(timeout=WAIT_S)  # the server has heard of it
        terminal.wait_for("> ")
        terminal.type("two\n")
        terminal.wait_for("done")
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.process.wait(WAIT_S) == 0
    finally:
        terminal.close()
    told = [(message.role, message.content) for message in baton.requests[1].messages]
    assert told == [("user", "one"), ("assistant", "never "), ("user", "two")]
