"""Processes of Baton on this machine, and the addresses of their routers."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from baton.launch.run_record import RunRecord

PROC = Path("/proc")
MODULES = frozenset({"router", "prefill_worker", "decode_worker", "elastic_worker"})
DEFAULT_ADMIN = "127.0.0.1:50052"


@dataclass(frozen=True, slots=True)
class BatonProcess:
    """Process of this user. `arguments` and `environment` may have secrets and are never written."""

    pid: int
    module: str
    arguments: tuple[str, ...] = field(repr=False)
    environment: Mapping[str, str] | None = field(repr=False)  # None: not readable

    @property
    def name(self) -> str:
        return self.argument("--worker-id") or self.module

    def argument(self, flag: str) -> str | None:
        """Return the value of a flag, or of its variable."""
        for index, argument in enumerate(self.arguments[:-1]):
            if argument == flag:
                return self.arguments[index + 1]
        variable = "BATON_" + flag.removeprefix("--").replace("-", "_").upper()
        return (self.environment or {}).get(variable)


def admin_targets(processes: Sequence[BatonProcess], run: RunRecord | None) -> Sequence[str]:
    """Return the admin addresses of running routers, else of the last run, else the default."""
    routers = [_admin_address(each) for each in processes if each.module == "router"]
    return routers or (run.admin_targets if run else ()) or (DEFAULT_ADMIN,)


def _admin_address(process: BatonProcess) -> str:
    """Return where a router listens, unless it took a free port."""
    default_host, _, default_port = DEFAULT_ADMIN.rpartition(":")
    host = process.argument("--admin-host") or default_host
    host = default_host if host in ("0.0.0.0", "::", "localhost") else f"[{host}]" if ":" in host else host
    return f"{host}:{process.argument('--admin-port') or default_port}"


def find_processes(proc: Path = PROC) -> list[BatonProcess]:
    """Return this user's processes of Baton, by pid."""
    found = []
    for folder in sorted(proc.glob("[0-9]*"), key=lambda each: int(each.name)):
        try:
            if folder.stat().st_uid != os.getuid():
                continue
            command = _texts(folder / "cmdline")
        except OSError:
            continue  # exited
        module = _module_of(command)
        if module is not None:
            arguments = tuple(command[command.index("-m") + 2 :])
            found.append(BatonProcess(int(folder.name), module, arguments, _environment(folder)))
    return found


def _module_of(command: Sequence[str]) -> str | None:
    """Return `router` for `python -P -m baton.router ...`."""
    if "-m" not in command[:-1]:
        return None
    package, _, module = command[command.index("-m") + 1].partition(".")
    return module if package == "baton" and module in MODULES else None


def _environment(folder: Path) -> Mapping[str, str] | None:
    try:
        pairs = [text.partition("=") for text in _texts(folder / "environ")]
    except OSError:
        return None
    return {name: value for name, _, value in pairs if name}


def _texts(path: Path) -> list[str]:
    """Return the texts of a file of /proc. Raises: OSError."""
    return [text.decode(errors="replace") for text in path.read_bytes().split(b"\0")[:-1]]
