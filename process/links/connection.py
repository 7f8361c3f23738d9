"""One connection of a link on the worker's side: greeting, replay, then both directions concurrently.

Independent of protobuf: messages are objects with the fields of the protocols below.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any, Protocol, TypeVar

from baton.process.errors import InvalidArgument, Unavailable
from baton.process.links.channel import LinkViolation, Received
from baton.process.links.hub import LinkHub, LinkMessage, Outbox, RouterLink

HELLO_TIMEOUT_S = 5.0
RETRY_S = 0.5
ROUTER_ID_BYTES = 16
Message = TypeVar("Message", bound=LinkMessage)


class Greeting(Protocol):
    """Router's first message: router id, number of its last received message, and last known epoch of the worker."""

    @property
    def router_id(self) -> bytes: ...
    @property
    def received(self) -> int: ...
    @property
    def resumes_epoch(self) -> int: ...


class LinkCommand(Protocol):
    """Message from the router. `number` is 0 for a mere acknowledgement, and for a list of numbered `commands`."""

    @property
    def number(self) -> int: ...
    @property
    def acknowledged(self) -> int: ...
    @property
    def hello(self) -> Greeting: ...
    @property
    def commands(self) -> "LinkCommands": ...
    @property
    def repeat_ms(self) -> int: ...


class LinkCommands(Protocol):
    """Several commands in one message, each with its own number."""

    @property
    def commands(self) -> Sequence[Any]: ...


Command = TypeVar("Command", bound=LinkCommand)


async def serve_connection(
    hub: LinkHub[Message],
    epoch: int,
    commands: AsyncIterator[Command],
    welcome: Callable[[bool, int], Message],
    on_command: Callable[[RouterLink[Message], Command], None],
) -> AsyncGenerator[Message, None]:
    """Serve one connection; yield the messages to send.

    `welcome(resumed, received)` creates the first message. `on_command` gets every command once, in order, and must not
    block. Raises: InvalidArgument if the greeting is late, or if the router acknowledges a message that was never sent;
    Unavailable while the worker stops.
    """
    greeting = await _greeting(commands)
    if hub.closed:
        raise Unavailable("the worker is stopping", "STOPPING", RETRY_S)
    link, resumed = hub.connect(greeting.router_id, resumes=greeting.resumes_epoch == epoch)
    outbox = link.outbox
    if outbox is None:
        raise RuntimeError("the link has no outbox although it has just connected")
    reader = asyncio.create_task(_read(link, outbox, commands, on_command))  # starts at the next await
    try:
        _acknowledge(link, greeting.received if resumed else 0)
        first = welcome(resumed, link.channel.last_received)
        outbox.put(first)
        for kept in link.channel.unacknowledged():
            outbox.put(kept.message)
        async for message in outbox.drain():
            yield message
        if reader.done():
            reader.result()  # raises an error of the reader
    finally:
        hub.disconnect(link, outbox)  # before any await, since a second cancellation would skip this call
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)


def _acknowledge(link: RouterLink[Message], number: int) -> None:
    try:
        link.channel.acknowledge(number)
    except LinkViolation as violation:
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
    link: RouterLink[Message],
    outbox: Outbox[Any],
    commands: AsyncIterator[Command],
    on_command: Callable[[RouterLink[Message], Command], None],
) -> None:
    """Process commands until the router closes the connection; then close the outbox, which ends the connection."""
    try:
        async for message in commands:
            _acknowledge(link, message.acknowledged)
            if message.repeat_ms:
                link.repeat_every(message.repeat_ms / 1e3)
            for command in message.commands.commands or (message,):
                if outbox.closed:
                    return  # a newer connection has replaced this one, or the link has closed
                if command.number == 0:
                    continue
                match link.channel.receive(command.number):
                    case Received.FRESH:
                        on_command(link, command)
                    case Received.DUPLICATE:
                        continue
                    case Received.GAP:
                        return  # the router reconnects and replays
    finally:
        outbox.close()
