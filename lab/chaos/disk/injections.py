"""Injections of disk faults and of damage to KV files."""

import asyncio
import errno
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from baton.kvtransfer.tier.files import OwnerBusy, RealDisk, Release
from baton.lab.chaos.disk import damage
from baton.lab.chaos.disk.counts import TierCounts
from baton.lab.chaos.disk.shim import DiskShim
from baton.lab.chaos.faults import WORKERS, Fault, FaultKind
from baton.lab.chaos.injection import MADE_S, Injection, NotMade, NotProven, Scene, shown
from baton.lab.chaos.watch import Life, is_alive


class Processes(Protocol):
    """Access to a stack's processes, for faults of disks and files."""

    def life(self, name: str) -> Life | None: ...

    def send(self, life: Life, number: signal.Signals) -> None: ...


@dataclass(frozen=True, slots=True)
class TierScene:
    """KV files of a run, and the disk library. `shim`: None if the disk cannot fail; files may still be damaged."""

    directory: Path
    shim: DiskShim | None
    counts: TierCounts


@dataclass(frozen=True, slots=True)
class DiskFault:
    """Kind of disk failure. `field`, `value`: field of the disk library that causes the failure, and its value.

    `count`: field that counts the affected calls. `turns_off`: what workers must turn off, `reads` or `writes`; None:
    nothing.
    """

    field: str
    value: int
    count: str
    turns_off: str | None


DISK_FAULTS = {
    FaultKind.READ_ERROR: DiskFault("read_error", errno.EIO, "failed_reads", "reads"),
    FaultKind.WRITE_ERROR: DiskFault("write_error", errno.EIO, "failed_writes", "writes"),
    FaultKind.DISK_FULL: DiskFault("write_error", errno.ENOSPC, "failed_writes", "writes"),
    FaultKind.DISK_HANGS: DiskFault("read_delay_us", 3_600_000_000, "slow_reads", None),
    FaultKind.SHORT_WRITES: DiskFault("cuts_writes", 1, "cut_writes", None),
}


class DiskFails:
    """Injection of a disk that fails for a while. Counts as not made if no worker reads or writes soon."""

    def __init__(self, shim: DiskShim, counts: TierCounts, disk_fault: DiskFault, lasts_s: float) -> None:
        self._shim = shim
        self._counts = counts
        self._fault = disk_fault
        self._lasts_s = lasts_s
        self._met_before = shim.get(disk_fault.count)
        self._off_before = counts.turned_off.copy()

    async def inject(self) -> None:
        self._met_before, self._off_before = self._shim.get(self._fault.count), self._counts.turned_off.copy()
        self._shim.set(self._fault.field, self._fault.value)

    async def prove(self) -> str:
        try:
            await shown(lambda: self._met > 0, "a call", MADE_S)
        except NotProven as error:
            raise NotMade("no worker read or wrote just then") from error
        way = self._fault.turns_off
        if way is not None:
            await shown(lambda: self._turned_off(way) > 0, f"a worker whose {way} are off")
        await asyncio.sleep(self._lasts_s)
        off = "" if way is None else f", {way} of {self._turned_off(way)} workers went off"
        return f"{self._met} calls affected{off}"

    async def heal(self) -> None:
        self._shim.set(self._fault.field, 0)

    @property
    def _met(self) -> int:
        return self._shim.get(self._fault.count) - self._met_before

    def _turned_off(self, way: str) -> int:
        return self._counts.turned_off[way] - self._off_before[way]


class KilledWriting:
    """Injection of `kill -9` of a worker in the middle of a write."""

    def __init__(self, processes: Processes, shim: DiskShim, life: Life) -> None:
        self._processes = processes
        self._shim = shim
        self._life = life

    async def inject(self) -> None:
        self._shim.set("torn_bytes", 0)
        self._shim.set("torn_pid", self._life.pid)
        try:
            await shown(lambda: self._shim.get("torn_bytes") > 0, "a write", MADE_S)
        except NotProven as error:
            self._shim.set("torn_pid", 0)
            raise NotMade(f"the worker wrote no KV files within {MADE_S:g} s") from error
        self._processes.send(self._life, signal.SIGKILL)

    async def prove(self) -> str:
        await shown(lambda: not is_alive(self._life), f"the end of {self._life.pid}")
        return f"pid {self._life.pid} is gone, {self._shim.get('torn_bytes')} bytes into a write"

    async def heal(self) -> None:
        """End the torn write; the supervisor restarts the worker."""
        self._shim.set("torn_pid", 0)


Damaging = Callable[[list[Path], random.Random], damage.Damage]
_DAMAGE: dict[FaultKind, tuple[Damaging, str]] = {
    FaultKind.FILE_FLIP: (damage.flip_bits, "bits flipped"),
    FaultKind.FILE_CUT: (damage.cut_off, "bytes cut off"),
    FaultKind.FILE_GARBAGE: (damage.add_garbage, "bytes of garbage"),
}


class FilesDamaged:
    """Injection of damage to all KV files, or to those of one worker, which is killed before.

    Workers must report blocks with flipped bits.
    """

    def __init__(
        self, processes: Processes, scene: TierScene, fault: Fault, life: Life | None, draw: random.Random
    ) -> None:
        self._processes = processes
        self._scene = scene
        self._kind = fault.kind
        self._owner = fault.target if life is not None else "*"
        self._life = life
        self._draw = draw
        self._done = damage.Damage(0, 0)
        self._corrupt_before = 0

    async def inject(self) -> None:
        if self._life is not None:
            self._processes.send(self._life, signal.SIGKILL)
            life = self._life
            await shown(lambda: not is_alive(life), f"the end of {life.pid}")
        self._corrupt_before = self._corrupt
        change, _ = _DAMAGE[self._kind]
        paths = damage.segment_paths(self._scene.directory, self._owner)
        try:
            self._done = await asyncio.to_thread(change, paths, self._draw)
        except FileNotFoundError as error:
            raise NotMade("the owner removed a file during the damage") from error
        if not self._done.places:
            raise NotMade("no KV in files")

    async def prove(self) -> str:
        what = f"{self._done.places} {_DAMAGE[self._kind][1]} in {self._done.files} files"
        if self._kind is FaultKind.FILE_FLIP and self._life is None:
            await shown(lambda: self._corrupt > self._corrupt_before, f"{what}, a damaged block")
        return f"{what}, {self._corrupt - self._corrupt_before} damaged blocks found"

    async def heal(self) -> None:
        """Do nothing: the damage remains until the owner of a file removes the file."""

    @property
    def _corrupt(self) -> int:
        return self._scene.counts.totals["corrupt_blocks"]


class OtherModelPut:
    """Injection of another model's segments with the served model's block names. No worker may read these segments."""

    def __init__(self, directory: Path, draw: random.Random) -> None:
        self._directory = directory
        self._draw = draw
        self._done = damage.Damage(0, 0)

    async def inject(self) -> None:
        try:
            self._done = await asyncio.to_thread(damage.add_other_model, self._directory, self._draw)
        except (FileExistsError, FileNotFoundError) as error:
            raise NotMade(f"the owner created or removed the same file: {error}") from error
        if not self._done.places:
            raise NotMade("no KV in files")

    async def prove(self) -> str:
        return f"{self._done.places} blocks of another model under our names, in {self._done.files} files"

    async def heal(self) -> None:
        """Do nothing: the files remain until the end of the run."""


class FolderTaken:
    """Injection of a lost folder: this process locks the folder of a killed worker.

    Until it unlocks the folder, the restarted worker must serve without files.
    """

    def __init__(self, processes: Processes, scene: TierScene, name: str, life: Life, lasts_s: float) -> None:
        self._processes = processes
        self._scene = scene
        self._name = name
        self._life = life
        self._lasts_s = lasts_s
        self._release: Release | None = None

    async def inject(self) -> None:
        self._processes.send(self._life, signal.SIGKILL)
        await shown(self._claims, f"the folder of {self._name}, which was killed, free")

    def _claims(self) -> bool:
        try:
            self._release = RealDisk(self._scene.directory).claim(self._name)
        except OwnerBusy as error:
            if self._processes.life(self._name) not in (None, self._life):
                raise NotMade(f"the restarted worker locked its folder first: {error}") from error
        return self._release is not None

    async def prove(self) -> str:
        def serves_without() -> bool:
            values = self._scene.counts.latest.get(self._name, {})  # lacks counters until the worker has restarted
            return values.get("reads") == values.get("writes") == 0.0

        await shown(serves_without, f"{self._name} without files")
        await asyncio.sleep(self._lasts_s)
        return f"pid {self._life.pid} is gone, its successor served without files for {self._lasts_s:.1f} s"

    async def heal(self) -> None:
        if self._release is not None:
            self._release()
            self._release = None


FILE_KINDS = frozenset(
    {FaultKind.FILE_FLIP, FaultKind.FILE_CUT, FaultKind.FILE_GARBAGE, FaultKind.OTHER_MODEL, FaultKind.FOLDER_TAKEN}
)
SHIM_KINDS = frozenset({*DISK_FAULTS, FaultKind.KILL_WRITING})


def disk_injection(fault: Fault, scene: Scene) -> Injection:
    """Create the injection of a fault of FILE_KINDS or SHIM_KINDS. Raises: NotMade if the stack lacks what it needs."""
    tier, life = scene.tier, scene.stack.life(fault.target) if fault.target in WORKERS else None
    if tier is None:
        raise NotMade("workers keep no KV in files")
    if fault.target in WORKERS and life is None:
        raise NotMade(f"{fault.target} is not running")
    match fault.kind:
        case FaultKind.FILE_FLIP | FaultKind.FILE_CUT | FaultKind.FILE_GARBAGE:
            return FilesDamaged(scene.stack, tier, fault, life, scene.draw)
        case FaultKind.OTHER_MODEL:
            return OtherModelPut(tier.directory, scene.draw)
        case FaultKind.FOLDER_TAKEN if life is not None:
            return FolderTaken(scene.stack, tier, fault.target, life, fault.lasts_s)
    if tier.shim is None:
        raise NotMade("disk faults need a C compiler")
    if life is not None:
        return KilledWriting(scene.stack, tier.shim, life)
    return DiskFails(tier.shim, tier.counts, DISK_FAULTS[fault.kind], fault.lasts_s)
