"""Whether anybody listens at an address: the one sign that tells a process that is gone from one that is slow."""

import asyncio

_WAIT_S = 0.5  # an answer of the kernel; where none comes, nobody refuses


async def refuses_connections(endpoint: str) -> bool:
    """`endpoint` is host:port, an IPv6 host in brackets. True where the connection is refused, and only then."""
    host, _, port = endpoint.rpartition(":")
    try:
        async with asyncio.timeout(_WAIT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError, ValueError):
        return False
    writer.close()
    return False
