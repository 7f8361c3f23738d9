"""What a session writes: everything once and in order, cancels that wait in a row in one message."""

import asyncio
import random
from collections.abc import Sequence

from baton.protos import session_pb2
from baton.router.fleet import wire as link_wire
from baton.router.fleet.link import MOST_TOGETHER, LinkOutbox
from baton.router.fleet.wire import Command


def numbered(number: int, is_cancel: bool) -> Command:
    command = link_wire.cancel(number) if is_cancel else link_wire.want(number, 1)
    command.message.number = number
    return command


async def written(commands: Sequence[Command]) -> list[list[session_pb2.ConnectRequest]]:
    """By message."""
    outbox = LinkOutbox()
    for command in commands:
        outbox.put(command)
    messages: list[list[session_pb2.ConnectRequest]] = []
    while sum(map(len, messages)) < len(commands):
        message = (await outbox.next()).message
        messages.append(list(message.commands.commands) or [message])
    return messages


async def test_cancels_that_wait_in_a_row_are_one_message() -> None:
    kinds = [True, True, True, False, True, False, False, True, True]
    messages = await written([numbered(number, kind) for number, kind in enumerate(kinds, 1)])
    assert [[each.number for each in message] for message in messages] == [[1, 2, 3], [4], [5], [6], [7], [8, 9]]


async def test_a_message_is_bounded() -> None:
    commands = [numbered(number, is_cancel=True) for number in range(1, 2 * MOST_TOGETHER + 2)]
    assert [len(message) for message in await written(commands)] == [MOST_TOGETHER, MOST_TOGETHER, 1]


async def test_whatever_waits_is_written_once_in_order_and_as_it_was() -> None:
    draw = random.Random(8)
    for _ in range(200):
        commands = [numbered(number, draw.random() < 0.7) for number in range(1, draw.randint(2, 30))]
        assert [each for message in await written(commands) for each in message] == [each.message for each in commands]


async def test_whoever_comes_first_waits_for_the_next_command() -> None:
    outbox = LinkOutbox()
    waiting = asyncio.create_task(outbox.next())
    await asyncio.sleep(0)
    outbox.put(numbered(1, is_cancel=True))
    assert (await waiting).message.number == 1
