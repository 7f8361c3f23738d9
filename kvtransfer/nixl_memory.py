"""KV copies over NIXL, by RDMA if the network has it. Optional extra `nixl`."""

import importlib
import importlib.util
import os
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from baton.kvtransfer.description import NixlHandle
from baton.kvtransfer.slices import MappedTransport, PoolShape, Span
from baton.kvtransfer.transport import LinkBroken, LinkRate, PeerUnreachable, SharedMemoryUnavailable

Result = TypeVar("Result")
READ_TIMEOUT_S = 10.0
POLL_S = 50e-6


def rdma_ports(interface: str, interfaces: Path) -> list[str]:
    """Return UCX's names, such as mlx5_0:1, of a network interface's RDMA ports; of a bond, those of its members.

    `interfaces`: directory in which Linux describes all interfaces.
    """
    own = interfaces / interface
    ports = [port for under in (".", "lower_*") for port in own.glob(f"{under}/device/infiniband/*/ports/*")]
    return sorted({f"{port.parts[-3]}:{port.name}" for port in ports})


@contextmanager
def _broken_by_nixl() -> Iterator[None]:
    """Convert every exception of NIXL into LinkBroken."""
    try:
        yield
    except LinkBroken:
        raise
    except Exception as error:  # NIXL's exceptions have no common base
        raise LinkBroken(f"nixl: {error}") from error


class NixlAgent:
    """NIXL agent of this process. Registers `pool`, uint8, one-dimensional, on any device."""

    def __init__(
        self,
        pool: torch.Tensor,
        name: str,
        interface: str,
        environment: MutableMapping[str, str] = os.environ,
        interfaces: Path = Path("/sys/class/net"),
    ) -> None:
        """Start NIXL. Raises: SharedMemoryUnavailable if it is not installed or does not start."""
        if importlib.util.find_spec("nixl") is None:
            raise SharedMemoryUnavailable("nixl is not installed")
        # By default UCX listens on every interface. In this list, an interface's name means TCP over the interface.
        environment["UCX_NET_DEVICES"] = ",".join([*rdma_ports(interface, interfaces), interface])
        nixl = importlib.import_module("nixl._api")
        self._pool = pool
        self._device = pool.device.index or 0
        self._memory = "VRAM" if pool.device.type == "cuda" else "DRAM"
        try:
            self._agent: Any = nixl.nixl_agent(name, nixl.nixl_agent_config(backends=["UCX"]))
            self._registered = self._agent.register_memory(
                [(pool.data_ptr(), pool.numel(), self._device, "")], self._memory
            )
        except Exception as error:  # NIXL's exceptions have no common base
            raise SharedMemoryUnavailable(f"nixl: {error}") from error

    @property
    def handle(self) -> NixlHandle:
        return NixlHandle(self._agent.get_agent_metadata(), self._pool.data_ptr(), self._device, self._memory)

    def add(self, peer: NixlHandle) -> str:
        """Add a peer and return its name. Raises: PeerUnreachable."""
        try:
            name = self._agent.add_remote_agent(peer.metadata)
        except Exception as error:  # NIXL's exceptions have no common base
            raise PeerUnreachable(f"nixl: {error}") from error
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove(self, peer: str) -> None:
        self._agent.remove_remote_agent(peer)

    def read(self, peer: str, remote: NixlHandle, spans: Sequence[Span]) -> None:
        """Read spans of the peer's pool into this one.

        Raises: LinkBroken. After it, remove the peer, to end reads that may still be running.
        """
        rows = [(span, row) for span in spans for row in range(span.rows)]
        own = [
            (self._pool.data_ptr() + s.destination + row * s.destination_pitch, s.width, self._device)
            for s, row in rows
        ]
        theirs = [(remote.address + s.source + row * s.source_pitch, s.width, remote.device) for s, row in rows]
        with _broken_by_nixl():
            self._transfer(peer, own, theirs, remote.memory)

    def measure(self, peer: str, remote: NixlHandle, nbytes: int) -> LinkRate:
        """Measure the link by reading into memory that is registered for the measurement. Raises: LinkBroken."""
        scratch = torch.empty(nbytes, dtype=torch.uint8, device=self._pool.device)
        whole = [(scratch.data_ptr(), nbytes, self._device)]
        theirs = [(remote.address, nbytes, remote.device)]
        with _broken_by_nixl():
            registered = self._agent.register_memory([(*whole[0], "")], self._memory)
            try:
                self._transfer(peer, whole, theirs, remote.memory)  # warm-up: the first read connects
                started = time.monotonic()
                self._transfer(peer, whole, theirs, remote.memory)
                took_s = time.monotonic() - started
            finally:
                self._agent.deregister_memory(registered)
        return LinkRate(nbytes, took_s)

    def _transfer(
        self, peer: str, own: list[tuple[int, int, int]], theirs: list[tuple[int, int, int]], their_memory: str
    ) -> None:
        agent = self._agent
        transfer = agent.initialize_xfer(
            "READ", agent.get_xfer_descs(own, self._memory), agent.get_xfer_descs(theirs, their_memory), peer, b""
        )
        try:
            deadline = time.monotonic() + READ_TIMEOUT_S
            state = agent.transfer(transfer)
            while state not in ("DONE", "ERR"):
                if time.monotonic() > deadline:
                    raise LinkBroken(f"NIXL did not finish a read within {READ_TIMEOUT_S:g} s")
                time.sleep(POLL_S)
                state = agent.check_xfer_state(transfer)
            if state == "ERR":
                raise LinkBroken("NIXL reports that the read failed")
        finally:
            agent.release_xfer_handle(transfer)

    def close(self) -> None:
        self._agent.deregister_memory(self._registered)


class NixlMemory:
    """A `MappedMemory` over NIXL. Only one thread may call it; any thread may call `close`."""

    def __init__(self, agent: NixlAgent, handle: NixlHandle, size_bytes: int) -> None:
        """Connect to a peer. Raises: PeerUnreachable."""
        self._agent = agent
        self._handle = handle
        self._size_bytes = size_bytes
        self._peer: str | None = agent.add(handle)

    def copy(self, spans: Sequence[Span]) -> None:
        """Copy spans. Raises: LinkBroken."""
        self._reading(lambda peer: self._agent.read(peer, self._handle, spans))

    def measure(self, nbytes: int) -> LinkRate:
        """Measure the link. Raises: LinkBroken."""
        size = min(nbytes, self._size_bytes)
        return self._reading(lambda peer: self._agent.measure(peer, self._handle, size))

    def _reading(self, read: Callable[[str], Result]) -> Result:
        if self._peer is None:
            raise LinkBroken("the link to the peer was closed")
        try:
            return read(self._peer)
        except LinkBroken:
            self.close()
            raise

    def close(self) -> None:
        peer, self._peer = self._peer, None
        if peer is not None:
            self._agent.remove(peer)


class NixlTransport(MappedTransport):
    """Transport between workers on hosts that NIXL connects."""

    name = "nixl"

    def __init__(self, agent: NixlAgent, handle: NixlHandle, source: PoolShape, own: PoolShape) -> None:
        """Connect to a peer. Raises: PeerUnreachable."""
        super().__init__(NixlMemory(agent, handle, source.parts * source.part_bytes), source, own)
