"""Processes of Baton on this machine, and the addresses of their routers."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from baton.launch.ports import LOOPBACK
from baton.launch.run_record import RunRecord
from baton.process.config import variable_of

PROC = Path("/proc")
MODULES = frozenset({"router", "prefill_worker", "decode_worker", "elastic_worker"})
DEFAULT_ADMIN_PORT = 50052


@dataclass(frozen=True, slots=True)
class BatonProcess:
    """Baton process of this user. `arguments` and `environment` may contain secrets: never write them to the bundle."""

    pid: int
    module: str
    arguments: tuple[str, ...] = field(repr=False)
    environment: Mapping[str, str] | None = field(repr=False)  # None if the process may not be read

    @property
    def name(self) -> str:
        return self.argument("--worker-id") or self.module

    def argument(self, flag: str) -> str | None:
        """Return the value of a flag, else of its BATON_* environment variable."""
        for index, argument in enumerate(self.arguments[:-1]):
            if argument == flag:
                return self.arguments[index + 1]
        return (self.environment or {}).get(variable_of(flag.removeprefix("--").replace("-", "_")))


def admin_targets(processes: Sequence[BatonProcess], run: RunRecord | None) -> Sequence[str]:
    """Return the admin addresses of running routers, else of the last run, else the default.

    The address of a router with port 0 is useless, since the router chose a free port itself.
    """
    routers = []
    for each in processes:
        if each.module == "router":
            host = each.argument("--admin-host") or LOOPBACK
            host = LOOPBACK if host in ("0.0.0.0", "::", "localhost") else f"[{host}]" if ":" in host else host
            routers.append(f"{host}:{each.argument('--admin-port') or DEFAULT_ADMIN_PORT}")
    return routers or (run.admin_targets if run else ()) or (f"{LOOPBACK}:{DEFAULT_ADMIN_PORT}",)


def find_processes(proc: Path = PROC) -> list[BatonProcess]:
    """Return this user's Baton processes in order of pid."""
    found = []
    for folder in sorted(proc.glob("[0-9]*"), key=lambda each: int(each.name)):
        try:
            if folder.stat().st_uid != os.getuid():
                continue
            command = _texts(folder / "cmdline")
        except OSError:
            continue  # the process has exited
        package, _, module = next((name for flag, name in pairwise(command) if flag == "-m"), "").partition(".")
        if package == "baton" and module in MODULES:
            arguments = tuple(command[command.index("-m") + 2 :])
            found.append(BatonProcess(int(folder.name), module, arguments, _environment(folder)))
    return found


def _environment(folder: Path) -> Mapping[str, str] | None:
    try:
        pairs = [text.partition("=") for text in _texts(folder / "environ")]
    except OSError:
        return None
    return {name: value for name, _, value in pairs if name}


def _texts(path: Path) -> list[str]:
    """Return the NUL-terminated texts of a file in /proc. Raises: OSError."""
    return [text.decode(errors="replace") for text in path.read_bytes().split(b"\0")[:-1]]
