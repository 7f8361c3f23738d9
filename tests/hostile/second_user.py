"""Process of another user of the machine, which tries to reach a service and prints the results as JSON.

It reads what it knows of the service from standard input. It is started as root, to import Baton, and drops root's
rights before the first attempt.
"""

import encodings.idna  # noqa: F401 -- imported lazily otherwise, when this user may no longer read the file
import json
import os
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from baton.kvtransfer.tcp.messages import HEAD, ID_BYTES, BlockRequest, Verdict, What, read_head, write_request
from baton.protos import admin_pb2, baton_pb2, kv_transfer_pb2, session_pb2, timeline_pb2

TIMEOUT_S = 20.0
SERVICES = {
    "admin": admin_pb2.DESCRIPTOR.services_by_name["AdminService"],
    "public": baton_pb2.DESCRIPTOR.services_by_name["BatonService"],
    "session": session_pb2.DESCRIPTOR.services_by_name["SessionService"],
    "transfer": kv_transfer_pb2.DESCRIPTOR.services_by_name["KvTransferService"],
    "timeline": timeline_pb2.DESCRIPTOR.services_by_name["TimelineService"],
}
Outcome = tuple[str, str]


def calls(kind: str, port: int) -> Iterator[Outcome]:
    """Call every method of a service; yield its status code."""
    channel: Any
    for method in SERVICES[kind].methods:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            path = f"/{SERVICES[kind].full_name}/{method.name}"
            try:
                # A streaming call fits any kind of method, since the error comes before a message is read.
                for _ in channel.stream_stream(path)(iter([b""]), timeout=TIMEOUT_S):
                    yield f"{kind} {method.name}", "ANSWERED"
                    break
                else:
                    yield f"{kind} {method.name}", "ENDED"
            except grpc.RpcError as error:
                yield f"{kind} {method.name}", error.code().name


def redis_commands(port: int) -> Iterator[Outcome]:
    """Send Redis commands; yield the first word of each answer."""
    for command in ("KEYS *", "SET x 1", "FLUSHALL", "CONFIG GET *", "AUTH default x"):
        with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as connection:
            connection.sendall(f"{command}\r\n".encode())
            yield f"redis {command}", connection.recv(4096).decode().partition(" ")[0]


def listening(uid: int) -> Iterator[int]:
    """Yield the ports on which processes of that user listen."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and int(fields[7]) == uid:
            yield int(fields[1].rpartition(":")[2], 16)


def blocks_of(port: int) -> str:
    """Ask for blocks of a KV pool by the protocol for KV over TCP."""
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as connection:
        connection.settimeout(TIMEOUT_S)
        connection.sendall(write_request(BlockRequest(What.PROBE, bytes(ID_BYTES), bytes(ID_BYTES), 0, 64)))
        try:
            head = read_head(connection.recv(HEAD.size, socket.MSG_WAITALL))
        except (OSError, ValueError) as error:
            return type(error).__name__
    return "ANSWERED" if head == (Verdict.SENT, 64) else "UNKNOWN POOL"


def looks(targets: dict[str, Callable[[], object]]) -> Iterator[Outcome]:
    for name, look in targets.items():
        try:
            found = look()
        except PermissionError:
            yield name, "PERMISSION"
        else:
            yield name, f"SEEN {found!r}"[:200]


def process_parts(pid: int) -> dict[str, Callable[[], object]]:
    folder = Path(f"/proc/{pid}")
    return {
        f"environment of {pid}": (folder / "environ").read_bytes,
        f"memory of {pid}": lambda: (folder / "mem").open("rb"),
        f"maps of {pid}": lambda: (folder / "maps").read_text()[:100],
        f"files of {pid}": lambda: list((folder / "fd").iterdir()),
    }


def content(path: Path) -> object:
    return list(path.iterdir()) if path.is_dir() else path.read_bytes()


def shared_memory(uid: int) -> Iterator[Outcome]:
    for path in Path("/dev/shm").iterdir():
        status = path.lstat()
        if status.st_uid == uid and stat.S_ISREG(status.st_mode) and os.access(path, os.R_OK):
            yield f"shared memory {path.name}", "SEEN"


def main() -> None:
    known: dict[str, Any] = json.load(sys.stdin)
    victim = os.getuid()
    list(calls("admin", 1))  # gRPC imports some modules with the first call, which this user could not read
    os.setgroups([])
    os.setresgid(known["uid"], known["uid"], known["uid"])
    os.setresuid(known["uid"], known["uid"], known["uid"])
    found: list[Outcome] = [*redis_commands(known["redis"])]
    found += [outcome for kind in ("admin", "public") for outcome in calls(kind, known[kind])]
    for port in known["workers"]:
        found += [outcome for kind in ("session", "transfer", "timeline") for outcome in calls(kind, port)]
    found += [(f"blocks from port {port}", blocks_of(port)) for port in listening(victim) if port in known["owned"]]
    for pid in known["pids"]:
        found += looks(process_parts(pid))
    paths = {path: Path(path) for path in known["paths"]}
    found += looks({name: partial(content, path) for name, path in paths.items()})
    found += shared_memory(victim)
    commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in known["pids"]]
    json.dump({"found": found, "commands": commands}, sys.stdout)


if __name__ == "__main__":
    main()
