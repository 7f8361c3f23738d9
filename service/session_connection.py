"""One connection of a session on the worker's side: the greeting, the replay, then both directions at once.

Knows the order of things but no protobuf: messages are anything with the fields that the protocols below name.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol, TypeVar

from service.errors import InvalidArgument
from service.session_channel import Received
from service.session_hub import Outbox, RouterSession, SessionHub, SessionMessage

HELLO_TIMEOUT_S = 5.0
ROUTER_ID_BYTES = 16


class Greeting(Protocol):
    """The router's first message: who it is, what it has, and which life of this worker it remembers."""

    @property
    def router_id(self) -> bytes: ...
    @property
    def received(self) -> int: ...
    @property
    def resumes_epoch(self) -> int: ...


class SessionCommand(Protocol):
    """A message from the router; `number` is 0 for a bare acknowledgement."""

    @property
    def number(self) -> int: ...
    @property
    def acknowledged(self) -> int: ...
    @property
    def hello(self) -> Greeting: ...


Command = TypeVar("Command", bound=SessionCommand)
Message = TypeVar("Message", bound=SessionMessage)


async def serve_connection(
    hub: SessionHub[Message],
    epoch: int,
    commands: AsyncIterator[Command],
    welcome: Callable[[bool, int], Message],
    on_command: Callable[[RouterSession[Message], Command], None],
) -> AsyncIterator[Message]:
    """Serves one connection and yields what is to be written to it.

    `welcome(resumed, received)` makes the first message. `on_command` gets every command once, in order, and must not
    wait. Raises: InvalidArgument for a connection that does not begin with a greeting in time.
    """
    greeting = await _greeting(commands)
    session, resumed = hub.connect(greeting.router_id, resumes=greeting.resumes_epoch == epoch)
    outbox = session.outbox
    if outbox is None:
        raise RuntimeError("a session that has just connected has an outbox")
    session.channel.acknowledge(greeting.received if resumed else 0)
    session.tell(welcome(resumed, session.channel.last_received))
    for kept in session.channel.unacknowledged():
        outbox.put(kept.message)
    reader = asyncio.create_task(_read(session, outbox, commands, on_command))
    try:
        async for message in outbox.drain():
            yield message
        if reader.done():
            reader.result()  # what went wrong while reading ends the connection loudly
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        hub.disconnect(session, outbox)


async def _greeting(commands: AsyncIterator[Command]) -> Greeting:
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            first = await anext(commands)
    except (TimeoutError, StopAsyncIteration) as error:
        raise InvalidArgument("hello", f"a session begins with Hello within {HELLO_TIMEOUT_S:g} s") from error
    if len(first.hello.router_id) != ROUTER_ID_BYTES:
        raise InvalidArgument("hello.router_id", f"must be {ROUTER_ID_BYTES} bytes")
    return first.hello


async def _read(
    session: RouterSession[Message],
    outbox: Outbox[Any],
    commands: AsyncIterator[Command],
    on_command: Callable[[RouterSession[Message], Command], None],
) -> None:
    """Takes in commands until the router hangs up, then closes the outbox, which ends the connection."""
    try:
        async for command in commands:
            session.channel.acknowledge(command.acknowledged)
            if command.number == 0:
                continue
            match session.channel.receive(command.number):
                case Received.FRESH:
                    on_command(session, command)
                case Received.DUPLICATE:
                    continue
                case Received.GAP:
                    return  # the router must reconnect and replay
    finally:
        outbox.close()
