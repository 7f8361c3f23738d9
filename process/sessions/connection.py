"""Connection of a link on the worker's side: greeting, replay, then both directions concurrently.

Knows the order of things but no protobuf: messages are anything with the fields that the protocols below name.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any, Protocol, TypeVar

from baton.process.errors import InvalidArgument, Unavailable
from baton.process.sessions.channel import Received, SessionViolation
from baton.process.sessions.hub import Outbox, RouterSession, SessionHub, SessionMessage

HELLO_TIMEOUT_S = 5.0
RETRY_S = 0.5
ROUTER_ID_BYTES = 16
Message = TypeVar("Message", bound=SessionMessage)


class Greeting(Protocol):
    """The router's first message: its id, the last message it has, and the epoch of this worker that it remembers."""

    @property
    def router_id(self) -> bytes: ...
    @property
    def received(self) -> int: ...
    @property
    def resumes_epoch(self) -> int: ...


class SessionCommand(Protocol):
    """A message from the router; `number` is 0 for a bare acknowledgement, and where there are commands in it."""

    @property
    def number(self) -> int: ...
    @property
    def acknowledged(self) -> int: ...
    @property
    def hello(self) -> Greeting: ...
    @property
    def commands(self) -> "SessionCommands": ...


class SessionCommands(Protocol):
    """Several in one message, each with its number."""

    @property
    def commands(self) -> Sequence[Any]: ...


Command = TypeVar("Command", bound=SessionCommand)


async def serve_connection(
    hub: SessionHub[Message],
    epoch: int,
    commands: AsyncIterator[Command],
    welcome: Callable[[bool, int], Message],
    on_command: Callable[[RouterSession[Message], Command], None],
) -> AsyncGenerator[Message, None]:
    """Serves one connection and yields the messages to be written to it.

    `welcome(resumed, received)` makes the first message. `on_command` gets every command once, in order, and must not
    wait. Raises: InvalidArgument for a connection that does not begin with a greeting in time, or acknowledges a
    message that was never sent; Unavailable while the worker stops.
    """
    greeting = await _greeting(commands)
    if hub.closed:
        raise Unavailable("the worker is stopping", "STOPPING", RETRY_S)
    session, resumed = hub.connect(greeting.router_id, resumes=greeting.resumes_epoch == epoch)
    outbox = session.outbox
    if outbox is None:
        raise RuntimeError("a session that has just connected has an outbox")
    reader = asyncio.create_task(_read(session, outbox, commands, on_command))  # runs once this function waits
    try:
        _acknowledge(session, greeting.received if resumed else 0)
        first = welcome(resumed, session.channel.last_received)
        outbox.put(first)
        for kept in session.channel.unacknowledged():
            outbox.put(kept.message)
        async for message in outbox.drain():
            yield message
        if reader.done():
            reader.result()  # an error while reading ends the connection loudly
    finally:
        hub.disconnect(session, outbox)  # before any wait: a task that is cancelled twice has still done this
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)


def _acknowledge(session: RouterSession[Message], number: int) -> None:
    try:
        session.channel.acknowledge(number)
    except SessionViolation as violation:
        raise InvalidArgument("acknowledged", str(violation)) from violation


async def _greeting(commands: AsyncIterator[Command]) -> Greeting:
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            first = await anext(commands)
    except (TimeoutError, StopAsyncIteration) as error:
        raise InvalidArgument("hello", f"no Hello within {HELLO_TIMEOUT_S:g} s") from error
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
        async for message in commands:
            _acknowledge(session, message.acknowledged)
            for command in message.commands.commands or (message,):
                if outbox.closed:
                    return  # the session continues in a newer connection, or has ended: it takes no more from here
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
