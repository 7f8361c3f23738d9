"""Which transports work between two pools, best first, and why the others do not. Pure."""

from dataclasses import dataclass
from typing import Literal, get_args

from kvtransfer.description import PoolDescription, can_map
from kvtransfer.errors import PeerUnreachable

TransportChoice = Literal["auto", "shared_memory", "cuda_ipc", "nixl", "nccl", "gloo", "grpc"]
TransportName = Literal["shared_memory", "cuda_ipc", "nixl", "nccl", "gloo", "grpc"]
FASTEST_FIRST: tuple[TransportName, ...] = get_args(TransportName)


@dataclass(frozen=True, slots=True)
class Ways:
    possible: tuple[TransportName, ...]  # to be tried in this order
    reasons: tuple[str, ...]  # why each faster one is not among them


def possible_ways(mine: PoolDescription, theirs: PoolDescription, own_device: str, choice: TransportChoice) -> Ways:
    """`own_device`: the torch device type of our pool. Raises: PeerUnreachable where the one way asked for is none."""
    possible: list[TransportName] = []
    reasons: list[str] = []
    for name in FASTEST_FIRST:
        if choice not in ("auto", name):
            continue
        hindrance = _hindrance(name, mine, theirs, own_device)
        if hindrance is None:
            possible.append(name)
        elif choice == name:
            raise PeerUnreachable(hindrance)
        else:
            reasons.append(f"{name}: {hindrance}")
    return Ways(tuple(possible), tuple(reasons))


def _hindrance(name: TransportName, mine: PoolDescription, theirs: PoolDescription, own_device: str) -> str | None:
    match name:
        case "shared_memory":
            if own_device != "cpu":
                return "our pool is not in host memory"
            if theirs.shared_memory is None:
                return "its pool is not in shared memory"
            return None if can_map(mine, theirs) else _OTHER_HOST
        case "cuda_ipc":
            if own_device != "cuda":
                return "our pool is not on a GPU"
            if len(theirs.device_memory) != theirs.parts:
                return "its pool is not in memory of a GPU that others may open"
            return None if mine.host_id == theirs.host_id else _OTHER_HOST
        case "nixl":
            if mine.nixl is None:
                return "nixl is not available here (needs the nixl extra and --transfer-interface)"
            return None if theirs.nixl is not None else "nixl is not available there"
        case "nccl" | "gloo":
            if mine.group_backend != name:
                return f"{name} is not available here (needs --transfer-interface)"
            return None if theirs.group_backend == name else f"{name} is not available there"
        case "grpc":
            return None


_OTHER_HOST = "the peer runs on another host or in another PID namespace"
