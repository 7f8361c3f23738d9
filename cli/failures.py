"""What a failed call means to the person who made it, where gRPC speaks instead of our server. Pure."""

from collections.abc import Generator

import grpc

from cli.connection import API_KEY_VARIABLE
from client import BatonClientError, Event, NotAllowed, ServerError, Unavailable


def for_people(error: BatonClientError, target: str, begun: bool = False) -> BatonClientError:
    """The same kind of error with words of use. One that the server itself explained comes back as it is.

    `begun`: something of the answer had come.
    """
    # Our server gives every UNAVAILABLE a reason: without one there is no server, or no longer one.
    if isinstance(error, Unavailable) and error.reason is None:
        lost = f"lost the connection to {target}" if begun else f"no answer from {target}"
        return Unavailable(f"{lost}; is `baton up` running?", error.details)
    if isinstance(error, NotAllowed):
        return NotAllowed(f"{error.message}; {API_KEY_VARIABLE} is where the key is looked for", error.details)
    if error.code is grpc.StatusCode.UNIMPLEMENTED:
        text = f"{target} does not serve this; --target is the public port of a router, --admin its admin port"
        return ServerError(text, error.details, error.code)
    return error


def explained(events: Generator[Event, None, None], target: str) -> Generator[Event, None, None]:
    """The same events, their error in words of use."""
    begun = False
    try:
        for event in events:
            begun = True
            yield event
    except BatonClientError as error:
        said = for_people(error, target, begun)
        if said is error:
            raise
        raise said from error
