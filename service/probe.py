"""Whether a process listens at an address: the one sign that distinguishes a dead process from a slow one."""

import asyncio

_WAIT_S = 0.5  # an answer of the kernel; without one, the connection is not refused


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
