"""Gets one engine going for `baton bench peers`: converts the checkpoint where that was not done yet, and loads it."""

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cli.bench.peers_known import Form, Peer, Precision, conversion_command, converted_path
from cli.bench.peers_process import PeerFailed, PeerProcess
from cli.paths import ROOT

CONVERSION_S = 1800.0
ERROR_LINES = 3


@dataclass(frozen=True, slots=True)
class Room:
    """The load that an engine is to be made for."""

    checkpoint: Path
    folder: Path  # of environments and converted checkpoints
    logs: Path
    threads: int
    batch: int  # sequences at once, at most
    tokens: int  # of a sequence, at most


def start_peer(peer: Peer, precision: Precision, python: str, room: Room, note: Callable[[str], None]) -> PeerProcess:
    """Raises: PeerFailed."""
    source = _converted(peer, precision, python, room, note)
    note(f"loading {peer.name} {precision}")
    sizes = map(str, (room.threads, precision, room.batch, room.tokens))
    return PeerProcess(
        [python, "-m", f"benchmarks.peers.{peer.driver}", str(source), *sizes],
        {"OMP_NUM_THREADS": str(room.threads), "HF_HUB_OFFLINE": "1"},
        sorted(os.sched_getaffinity(0))[: room.threads],
        room.logs / f"{peer.name}-{precision}.log",
    )


def _converted(peer: Peer, precision: Precision, python: str, room: Room, note: Callable[[str], None]) -> Path:
    """Raises: PeerFailed."""
    output = converted_path(peer, precision, room.checkpoint, room.folder)
    if peer.form is Form.CHECKPOINT or output.exists():
        return output
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f"partial-{output.name}")
    note(f"converting {room.checkpoint.name} for {peer.name} {precision}")
    command = conversion_command(peer, precision, python, room.checkpoint, partial)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    try:
        subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True, timeout=CONVERSION_S)
    except subprocess.CalledProcessError as error:
        last = error.stderr.decode(errors="replace").strip().splitlines()[-ERROR_LINES:]
        raise PeerFailed(": ".join(["its converter failed", *last])) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerFailed(str(error)) from error
    return partial.rename(output)
