"""One TCP stream of zeros between two processes, in memory at both ends, and nothing else: the limit of a link.

.venv/bin/python -m baton.lab.benchmarks.transfer.plain_stream ADDRESS PORT       sends to each that connects and asks
"""

import socket
import struct
import sys
import time

ASKED = struct.Struct("<Q")  # bytes
PIECE_BYTES = 1 << 20
TIMEOUT_S = 60.0


def gb_per_s(address: str, port: int, nbytes: int) -> float:
    """Of so many bytes, from asking for them to the last one. Raises: OSError."""
    place = memoryview(bytearray(PIECE_BYTES))
    with socket.create_connection((address, port), TIMEOUT_S) as stream:
        left, began = nbytes, time.monotonic()
        stream.sendall(ASKED.pack(nbytes))
        while left:
            received = stream.recv_into(place[:left])
            if not received:
                raise ConnectionError(f"{left} of {nbytes} bytes are missing")
            left -= received
        return nbytes / 1e9 / (time.monotonic() - began)


def main() -> None:
    piece = memoryview(bytes(PIECE_BYTES))
    with socket.create_server((sys.argv[1], int(sys.argv[2]))) as listener:
        print("listening", flush=True)
        while True:
            stream, _ = listener.accept()
            with stream:
                (left,) = ASKED.unpack(stream.recv(ASKED.size, socket.MSG_WAITALL))
                while left:
                    left -= stream.send(piece[:left])


if __name__ == "__main__":
    main()
